# SPDX-License-Identifier: Apache-2.0
"""A start refuses places with saves of another run, even if it cannot read them."""

from dataclasses import replace
from pathlib import Path

import pytest

from hetjax.checkpoint.run_identity import RunIdentity
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.training.directory.identity import Claim, OtherRun
from hetjax.training.directory.leftover_checkpoints import identify, saved_here
from tests.checkpoint.values import state_of

ONE, TWO = RunIdentity(id="1111"), RunIdentity(id="2222")
NEW = Claim(
    run_dir="runs/new", own=None, is_new=True, lease=1, fresh="ffff", settings={}
)
ITS = replace(NEW, own=ONE, is_new=False)


def key_file(folder: Path, name: str) -> str:
    path = folder / name
    path.write_text(name * 32)
    path.chmod(0o600)
    return str(path)


def saved(storage: CheckpointStorage) -> None:
    with storage.writer("a") as writer:
        writer.save(2, state_of(2), host={"attempt": f"{1 << 32:016x}"})


@pytest.mark.parametrize("claim", [NEW, ITS])
@pytest.mark.parametrize("place", ["folder", "store"])
@pytest.mark.parametrize("other_key", [None, "other.key"])
def test_saves_that_the_key_does_not_open_still_refuse(
    tmp_path: Path, claim: Claim, place: str, other_key: str | None
):
    other = CheckpointStorage(
        directory=str(tmp_path / "local"),
        cloud=None if place == "folder" else str(tmp_path / "store"),
        key_file=other_key and key_file(tmp_path, other_key),
        run=TWO,
    )
    saved(other)
    own = replace(other, key_file=key_file(tmp_path, "own.key"), run=ONE)
    if place == "store":
        own = replace(own, directory=str(tmp_path / "elsewhere"))
    with pytest.raises(OtherRun, match=f"{place} .* of run 2222 that cannot be read"):
        identify(claim, own, saved_here(own, "a"), lambda text: None)


def test_a_run_may_have_lost_the_key_of_its_own_saves(tmp_path: Path):
    """They are its own saves; code that uses them reports that they are not trusted."""
    places = str(tmp_path / "local"), str(tmp_path / "store")
    storage = CheckpointStorage(directory=places[0], cloud=places[1], run=ONE)
    saved(storage)
    own = replace(storage, key_file=key_file(tmp_path, "own.key"))
    assert identify(ITS, own, saved_here(own, "a"), lambda text: None) == ONE
