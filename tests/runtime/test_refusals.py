# SPDX-License-Identifier: Apache-2.0
"""What a worker refuses to do reaches the user with the worker's name."""

from pathlib import Path

import pytest

from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.errors import BadInput
from hetjax.runtime.rpc import schema
from hetjax.runtime.rpc.rounds import Finish
from hetjax.runtime.rpc.worker_connections import answers_of
from hetjax.runtime.worker.service import WorkerService


def test_a_machine_that_cannot_log_in_to_the_store_is_refused_before_it_takes_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    service = WorkerService("c", lambda settings: pytest.fail("nothing is built"))
    storage = CheckpointStorage(
        directory=str(tmp_path / "disk"), cloud="s3://bucket/run"
    )
    with pytest.raises(BadInput, match="s3://bucket/run, but no AWS credentials"):
        service.answer(schema.FindSaves(storage=storage))


def test_a_refusal_names_its_worker():
    refused = schema.RequestRefused(got="no login", allowed="a login", fix="log in")
    replies = {"a": schema.FoundSaves(saves=[], place=""), "c/1": refused}
    finish = Finish(replies=replies, trouble=("c/1", "failed: bad input"))
    with pytest.raises(BadInput) as caught:
        answers_of(finish, schema.FindSaves)
    assert caught.value.got == "no login (worker c/1)"
    assert (caught.value.allowed, caught.value.fix) == ("a login", "log in")
