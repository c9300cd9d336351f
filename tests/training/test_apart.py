# SPDX-License-Identifier: Apache-2.0
"""A run whose machines share no folders: one run for all tests.

Two machines that join hold half of the model each; only the controller has the folder
of the initial weights. One machine and its disk are lost for good, and another one
takes its place. Between two starts, the disk of the other machine is lost, and the run
resumes by `ssh`. It trains like an undisturbed run in one process, and the controller's
machine gets the last checkpoint, and again once it is removed there. In the end, both
disks are lost, and a start by Slurm must not begin anew.
"""

import errno
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import load_file

from hetjax.api.exporting import export_model
from hetjax.checkpoint.stores.store import StoreError
from hetjax.models.hugging_face.known_families import fields_of
from hetjax.models.hugging_face.written import write_model
from hetjax.models.named import named_config
from hetjax.runtime.rpc.worker_connections import WorkerLost
from hetjax.train import main
from hetjax.training import ending
from hetjax.training.recovery.notices import StopRequest
from hetjax.training.recovery.recovered import GivenUp
from tests.launchers import fake_programs
from tests.launchers.apart import Machines, switch_off
from tests.launchers.joining import joining, told
from tests.training.pair import (
    ONE_REPLICA,
    STEPS,
    after_steps,
    trained,
    training,
    wait_until,
)
from tests.training.small import but, events, small_preset
from tests.training.test_far_runs import HOSTS
from tests.training.test_workers import losses, set_environment

PATIENCE_S = 120.0
ADDRESSES = {"left": "127.0.0.2", "right": "127.0.0.3"}


class ApartRun:
    """The run, its machines, and a record of its course."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.run_dir, self.folder = folder / "run", folder
        self.weights, text = folder / "weights", cache.with_suffix(".txt")
        text.touch()
        write_weights(self.weights)
        self.machines = Machines(
            folder=folder / "machines",
            run_dir=self.run_dir,
            cache=cache,
            hidden=(text, self.weights),
        )
        self.joined: dict[str, subprocess.Popen[str]] = {}
        self.saved: dict[str, list[str]] = {}  # on both disks, by event
        self.in_run_dir: list[Path] = []  # on machines other than the controller's
        self.gathered: dict[str, list[str]] = {}  # parts in the run directory, by event
        self.codes, self.refused = list[int](), StringIO()

    def join(self, node: str) -> None:
        now, address = told(self.run_dir)[node], ADDRESSES[node]
        typed = [*now.words, "--address", address]
        prefix = [str(self.machines.program), address]
        out = self.folder / f"{node}.out"
        self.joined[node] = joining(typed, now.token, out, prefix)

    def join_all(self) -> None:
        wait_until(lambda: len(told(self.run_dir)) == 2, PATIENCE_S)
        for node in ADDRESSES:
            self.join(node)

    def output(self, node: str) -> str:
        return (self.folder / f"{node}.out").read_text()

    def lose(self, node: str) -> None:
        """Lose the machine and its disk; another machine joins in its place."""
        wait_until(lambda: len(self.machines.saved(ADDRESSES[node])) == 2)
        self.note_saved("when right was lost")
        switch_off(self.joined[node].pid)
        self.joined.pop(node).wait()
        self.machines.lose_disk(ADDRESSES[node])
        self.join(node)
        wait_until(lambda: self.output(node).count("joined as") == 2, PATIENCE_S)

    def note_saved(self, when: str) -> None:
        for node, address in ADDRESSES.items():
            self.saved[f"{node} {when}"] = self.machines.saved(address)
            self.in_run_dir += [*(self.machines.disk(address) / "run").iterdir()]

    def note_gathered(self, when: str) -> None:
        parts = (self.run_dir / "checkpoints").glob("step_*/*")
        self.gathered[when] = sorted(f"{p.parts[-2]}/{p.name}" for p in parts)

    def log(self) -> str:
        return (self.run_dir / "log.txt").read_text()

    def end(self) -> None:
        for machine in self.joined.values():
            machine.kill()
            machine.wait()


def write_weights(folder: Path) -> None:
    """Write weights of preset `tiny` that no seed gives."""
    rng, config = np.random.default_rng(0), named_config("tiny")
    folder.mkdir()
    write_model(
        folder,
        config,
        fields_of(config),
        lambda _, shape: rng.normal(0, 0.05, shape).astype(np.float32),
        "float32",
    )


@pytest.fixture(scope="module")
def alone(run: ApartRun, cache: Path, quickly: None) -> list[float]:
    """The losses of the same run in one process."""
    run_dir = run.folder / "alone"
    words = training(run_dir, cache, "--launcher", "embedded", of=ONE_REPLICA)
    assert main([*words, "--init", str(run.weights)]) == 0
    return losses(run_dir)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[ApartRun]:
    folder = tmp_path_factory.mktemp("apart")
    run = ApartRun(folder, cache)
    with pytest.MonkeyPatch.context() as patched:
        set_environment(patched)
        patched.setenv("JAX_PLATFORMS", "cpu")
        programs = fake_programs.put_on_path(folder, patched)

        to_lose = ["right"]

        def lose(done: int) -> None:
            if done == 3 and to_lose:
                run.lose(to_lose.pop())

        after_steps(patched, lose)
        joins = ["--launcher", "join", "--join.address", "127.0.0.1:0"]
        starting = threading.Thread(target=run.join_all)
        starting.start()
        try:
            begins = ["--init", str(run.weights)]
            words = training(run.run_dir, cache, *joins, *begins, of=ONE_REPLICA)
            run.codes.append(main([*words, "--stop-after", "4"]))
            starting.join()
            run.note_saved("between")
            run.note_gathered("between")
            run.end()
            run.machines.lose_disk(ADDRESSES["left"])
            hosts = folder / "hosts.toml"
            hosts.write_text(HOSTS)
            for name in ("ssh", "srun"):
                (programs / f"{name}.apart").write_text(str(run.machines.program))
            ssh = ["--launcher", "ssh", "--hosts", str(hosts)]
            words = training(run.run_dir, cache, *ssh, *begins, of=ONE_REPLICA)
            run.codes.append(main(words))
            run.note_saved("at the end")
            run.note_gathered("at the end")
            shutil.rmtree(run.run_dir / "checkpoints")
            run.codes.append(main(words))
            run.note_gathered("once more")
            for address in ADDRESSES.values():
                run.machines.lose_disk(address)
            patched.setenv("SLURM_JOB_ID", "1")
            by_slurm = ["--launcher", "slurm", "--steps", "8", *begins]
            words = training(run.run_dir, cache, *by_slurm, of=ONE_REPLICA)
            with redirect_stderr(run.refused):
                run.codes.append(main(words))
            yield run
        finally:
            run.end()


def test_losses_are_those_of_machines_that_share_a_folder(
    run: ApartRun, alone: list[float]
):
    assert run.codes[:3] == [4, 0, 0]
    assert losses(run.run_dir) == pytest.approx(alone, rel=1e-5)
    assert trained(run.run_dir) == [*STEPS]


def test_the_state_of_a_lost_machine_is_on_the_disk_of_another(run: ApartRun):
    (recovered,) = events(run.run_dir, "recovered")
    assert (recovered["started"], recovered["step"]) == (["right"], 2)
    assert recovered["bytes"].keys() == {"disk", "peer"}
    assert run.saved["right when right was lost"] == ["2/left", "2/right"]
    restored, _ = events(run.run_dir, "restored")  # the disk of left was empty
    assert (restored["step"], restored["bytes"].keys()) == (4, {"disk", "peer"})
    for node in ADDRESSES:
        assert {"6/left", "6/right"} <= {*run.saved[f"{node} at the end"]}


def test_a_run_does_not_begin_anew_where_its_disks_are_gone(run: ApartRun):
    assert run.codes[3] == 2
    assert "a run that has saved step 6" in run.refused.getvalue()
    assert str(run.machines.folder / "home/hetjax") in run.refused.getvalue()


def test_nothing_is_written_where_the_run_directory_is_on_another_machine(
    run: ApartRun,
):
    assert not run.in_run_dir


def test_a_run_that_is_done_leaves_its_last_checkpoint_where_its_directory_is(
    run: ApartRun, alone: list[float]
):
    there = [f"step_00000006/{node}" for node in ADDRESSES]
    assert run.gathered == {"between": [], "at the end": there, "once more": there}
    assert "was not copied" not in run.log()
    lacks = "done all of its 6 steps, but its last checkpoint is on machines' own disks"
    assert run.log().count(lacks) == 1
    first, again = events(run.run_dir, "gathered")
    assert first["bytes"] == again["bytes"]
    size = f"{first['bytes']['peer']:,} bytes"
    assert f"copying the checkpoint of step 6 ({size}) from left, right" in run.log()
    found, expected = (exported(path) for path in (run.run_dir, run.folder / "alone"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)


def exported(run_dir: Path) -> dict[str, np.ndarray]:
    """Return the weights of a run's newest checkpoint, by their published names."""
    to = run_dir.with_name(f"{run_dir.name}-exported")
    export_model(run_dir, to)
    return load_file(to / "model.safetensors")


def test_text_and_weights_come_to_who_has_none(run: ApartRun):
    for node, times in (("left", 1), ("right", 2)):
        assert run.output(node).count("text: fetched train.npy") == times
        assert run.output(node).count("comes from the controller") == times


def test_people_are_told_who_does_not_see_the_directory_and_what_follows(
    run: ApartRun,
):
    (apart,) = events(run.run_dir, "apart")
    identity = json.loads((run.run_dir / "config.json").read_text())["run"]["id"]
    assert apart["folders"].keys() == {*ADDRESSES}
    assert all(Path(f).name == identity for f in apart["folders"].values())
    told = f"left, right do not see {run.run_dir}: checkpoints are kept on their own"
    assert run.log().count(told) == 3  # in each start that had workers
    assert f"on the disks of left, right and in {run.run_dir}/checkpoints;" in run.log()


def test_at_the_end_the_store_is_named_with_the_disks(tmp_path: Path):
    preset = but(small_preset(tmp_path), run_dir=tmp_path)
    apart = {"event": "apart", "step": 0, "time": "", "folders": {"a": "/state/1"}}
    (tmp_path / "events.jsonl").write_text(f"{json.dumps(apart)}\n")
    said = ending._what_is_here(preset.config)
    assert said == "checkpoints are on the disks of a; metrics and settings"
    store = replace(preset.config.checkpoint, cloud="s3://bucket/run")
    said = ending._what_is_here(replace(preset.config, checkpoint=store))
    where = "checkpoints are on the disks of a and in s3://bucket/run; "
    assert said == f"{where}metrics and settings"


@pytest.mark.parametrize(
    ("error", "tried"),
    [
        (StoreError("it takes 1 GiB"), [4, 6]),
        (OSError(errno.EROFS, "Read-only file system"), [4, 6]),
        (WorkerLost("left", "ended"), [4]),
        (GivenUp(), [4]),
    ],
)
def test_a_run_is_done_though_its_checkpoints_cannot_be_copied(
    error: Exception, tried: list[int], tmp_path: Path
):
    config = but(small_preset(tmp_path), run_dir=tmp_path, launcher="ssh").config
    asked, notes = list[int](), list[str]()

    def gather(step: int, also: list[int], on_begin: object) -> None:
        asked.append(step)
        raise error

    driver = SimpleNamespace(at=6, places=lambda: {"left": "/state"}, gather=gather)
    recorder = SimpleNamespace(note=notes.append)
    stop = StopRequest()
    ending.gather_results(cast(Any, driver), 4, config, cast(Any, recorder), stop)
    assert stop.is_saved and not cast(Any, driver).must_give_up()
    stop.reason = "SIGINT"
    assert cast(Any, driver).must_give_up()
    assert asked == tried
    for step, note in zip(tried, notes, strict=True):
        why = str(error) or "the run was asked to stop"
        begins = (
            f"the checkpoint of step {step} was not copied to this machine ({why}):"
        )
        assert note.startswith(begins)
