# SPDX-License-Identifier: Apache-2.0
"""A store that is unreachable for a while: saving and recovery continue without it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetjax.checkpoint.format import AttemptNames
from hetjax.checkpoint.reader import steps
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.checkpoint.stored_steps import committed_steps
from hetjax.checkpoint.stores.local import FileStore
from hetjax.errors import BadInput
from hetjax.runtime.control import recovery
from tests.checkpoint.values import state_of

LONG_S = 30.0


def test_a_worker_saves_while_its_store_is_not_there_and_uploads_once_it_is(
    tmp_path: Path,
) -> None:
    place = tmp_path / "store"
    place.write_text("no folder")
    storage = CheckpointStorage(directory=str(tmp_path / "saves"), cloud=str(place))
    with storage.writer("a") as writer:
        with pytest.warns(UserWarning, match="step 10 "):
            writer.save(10, state_of(1), host={})
            writer.wait()
            assert writer._uploader is not None and writer._uploader.wait(LONG_S)
        place.unlink()
        writer.save(20, state_of(2), host={})
    assert steps(tmp_path / "saves") == [10, 20]
    assert committed_steps(FileStore(place)) == [20]


def test_a_recovery_does_without_a_store_that_is_not_there(tmp_path: Path) -> None:
    place = tmp_path / "store"
    place.write_text("no folder")
    storage = CheckpointStorage(directory=str(tmp_path), cloud=str(place))
    controller: Any = SimpleNamespace(new_attempts=AttemptNames())
    with pytest.raises(BadInput, match="cannot be used"):
        storage.store()
    assert recovery._in_store(controller, storage) == []
