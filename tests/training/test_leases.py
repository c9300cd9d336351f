# SPDX-License-Identifier: Apache-2.0
"""Two runs on one directory: one trains, the other one says why it does not."""

import json
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from hetjax.checkpoint.leases.lease import LeaseHeld, LeaseLost, acquire
from hetjax.checkpoint.reader import DamagedCheckpoint, steps
from hetjax.checkpoint.storage import CheckpointStorage, lease_folder
from hetjax.training.directory import leases
from hetjax.training.directory.journal import Journal, read_journal
from hetjax.training.directory.rundir import LEASE
from hetjax.training.session import run
from hetjax.training.settings.config import CheckpointConfig
from tests.training.small import MODEL, but, small_preset

MACHINE = "hetjax.checkpoint.leases.lease_holder._machine"


def lease_names(run_dir: Path) -> list[str]:
    return lease_folder(run_dir / LEASE).names("lease/")


def attempts(run_dir: Path) -> list[int]:
    """Return the start that each checkpoint belongs to, by step."""
    found = sorted(run_dir.glob("checkpoints/*/*/manifest.json"))
    names = [json.loads(path.read_text())["host"]["attempt"] for path in found]
    return [int(name, 16) >> 32 for name in names]


def test_each_start_has_a_greater_number_which_its_checkpoints_carry(tmp_path: Path):
    preset = but(small_preset(tmp_path), stop_after=1)
    for number in (1, 2):
        assert run(preset.config, preset, MODEL) == 4
        (held,) = {name.split("/")[1] for name in lease_names(preset.config.run_dir)}
        assert int(held) == number
    assert attempts(preset.config.run_dir) == [1, 2]


def test_a_run_that_another_machine_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The lock says nothing here, as on many shared file systems."""
    preset = small_preset(tmp_path)
    run_dir = preset.config.run_dir
    run_dir.mkdir()
    with monkeypatch.context() as there:
        there.setattr(MACHINE, lambda: "another")
        other = acquire(lease_folder(run_dir / LEASE), "it", renew_s=0.1)
    with other:
        with pytest.raises(LeaseHeld, match=f"is in use by process {os.getpid()} on"):
            run(preset.config, preset, MODEL)
        assert {path.name for path in run_dir.iterdir()} <= {LEASE, ".lock"}
        other.fence.check()


def test_directory_and_store_of_a_lost_machine_are_waited_for_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As after a killed container: the next one cannot tell whether it is alive."""
    lease_s, notes = 2.0, list[str]()
    storage = CheckpointStorage(directory="", cloud=str(tmp_path / "store"))
    store = storage.store()
    assert store is not None
    with monkeypatch.context() as there:
        there.setattr(MACHINE, lambda: "another")
        for left in (lease_folder(tmp_path / "run" / LEASE), store):
            acquire(left, "it", renew_s=1e6)
    monkeypatch.setattr(leases, "acquire", partial(acquire, lease_s=lease_s))
    with ExitStack() as stack:
        leases.Leases(tmp_path / "run", storage, stack, notes.append)
    (note,) = notes
    assert note.startswith("waiting up to 2 s: run directory")


def test_a_run_whose_directory_was_taken_over_ends_and_writes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    preset = small_preset(tmp_path)
    run_dir, append = preset.config.run_dir, Journal.append

    def taken_over(journal: Journal, line: dict) -> None:
        append(journal, line)
        if line["step"] == 2 and "loss" in line:
            folder = lease_folder(run_dir / LEASE)
            folder.put_text("lease/0000000007/holder", "")

    monkeypatch.setattr(Journal, "append", taken_over)
    monkeypatch.setattr("hetjax.training.directory.leases._LOOK_S", 0.0)
    with pytest.raises(LeaseLost) as lost:
        run(preset.config, preset, MODEL)
    assert lost.value.exit_code == 1
    assert "was taken over by another process (lease 7)" in lost.value.got
    assert "run the same command again" in lost.value.fix
    assert max(line["step"] for line in read_journal(run_dir / "metrics.jsonl")) == 2
    assert all(step <= 2 for step in steps(run_dir / "checkpoints"))
    assert not (run_dir / "report.html").exists()


def test_a_run_with_a_key_goes_on_with_it_and_with_no_other(tmp_path: Path):
    keys = [tmp_path / name for name in ("one.key", "two.key")]
    for key in keys:
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
    ours, other = (
        but(
            small_preset(tmp_path),
            stop_after=1,
            checkpoint=CheckpointConfig(key_file=key),
        )
        for key in keys
    )
    assert run(ours.config, ours, MODEL) == 4
    with pytest.raises(DamagedCheckpoint, match="not signed with this run's key"):
        run(other.config, other, MODEL)
    assert run(ours.config, ours, MODEL) == 4
    assert steps(ours.config.run_dir / "checkpoints") == [1, 2]
