# SPDX-License-Identifier: Apache-2.0
"""Workers that hang while their hearts beat are lost once they exceed a limit."""

import os
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hetjax.launchers.local_processes import OnThisMachine
from hetjax.runtime.rpc.message import LIMITS, START, Limit
from hetjax.runtime.rpc.schema import (
    Abort,
    AwaitSaved,
    CollectLeaves,
    Compile,
    PlaceState,
    Request,
    SaveState,
    Train,
)
from hetjax.runtime.rpc.worker_connections import WorkerLost
from hetjax.train import main
from tests.training.hanging_worker import FOLDER
from tests.training.pair import between_steps, kill, training
from tests.training.small import events
from tests.training.test_workers import losses, processes_of

pytestmark = pytest.mark.usefixtures("environment")

MODULE = "tests.training.hanging_worker"


@pytest.fixture
def hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a file lets a worker hang."""
    folder = tmp_path / "hangs"
    folder.mkdir()
    monkeypatch.setenv(FOLDER, str(folder))
    defaults = OnThisMachine.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "module", MODULE)
    return folder


def limit(
    patched: pytest.MonkeyPatch, what: type[Request[Any]] | str, limit_s: float
) -> None:
    patched.setitem(LIMITS, what, Limit(limit_s, LIMITS[what].what))


@pytest.mark.nightly
def test_a_worker_that_hangs_in_a_step_or_a_save_is_replaced_and_no_number_changes(
    tmp_path: Path,
    cache: Path,
    whole: list[float],
    hangs: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    run_dir = tmp_path / "run"
    limit(monkeypatch, Train, 8.0)
    limit(monkeypatch, SaveState, 8.0)
    limit(monkeypatch, Abort, 2.0)
    asked = ("Train", "SaveState")
    between_steps(monkeypatch, *((hangs / what).touch for what in asked))
    assert main(training(run_dir, cache, "--checkpoint.every", "1")) == 0
    assert losses(run_dir) == whole
    reasons = [found["reason"] for found in events(run_dir, "recovered")]
    for reason, what in zip(reasons, ("train a step", "start a check"), strict=True):
        assert f"took more than 8 s to {what}" in reason
    assert not processes_of(run_dir)


@pytest.mark.nightly
def test_a_worker_that_hangs_while_it_compiles_restores_or_ends_a_save_is_survived(
    tmp_path: Path,
    cache: Path,
    whole: list[float],
    hangs: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    run_dir = tmp_path / "run"
    phases = Compile, CollectLeaves, PlaceState, AwaitSaved
    for phase in phases:
        limit(monkeypatch, phase, 20.0)  # enough for honest workers on a shared machine
    limit(monkeypatch, Abort, 2.0)
    first, *others = (hangs / phase.__name__ for phase in phases)
    first.touch()

    def lose_one(worker: str, then: Path) -> None:
        then.touch()
        kill(run_dir, worker)

    collecting, placing, waiting = others
    between_steps(
        monkeypatch,
        lambda: lose_one("right", collecting),
        lambda: lose_one("left", placing),
        waiting.touch,
    )
    assert main(training(run_dir, cache, "--checkpoint.every", "1")) == 0
    assert losses(run_dir) == whole
    logs = "".join(log.read_text() for log in (run_dir / "logs").iterdir())
    for phase in phases:
        assert f"told to abort: took more than 20 s to {LIMITS[phase].what}" in logs
    assert logs.count(" in hang\n") == len(phases)  # each has logged where it hung
    assert not processes_of(run_dir)


def test_a_worker_that_hangs_before_it_calls_is_named(
    tmp_path: Path, hangs: Path, monkeypatch: pytest.MonkeyPatch
):
    (hangs / "start").touch()
    limit(monkeypatch, START, 1.0)
    with ExitStack() as stack:
        launcher = OnThisMachine(tmp_path / "logs", stack)
        with pytest.raises(WorkerLost, match="'left' took more than 1 s to start"):
            launcher.start(["left"])


@pytest.mark.nightly
def test_a_stop_during_a_recovery_ends_it_in_time_and_the_next_start_goes_on(
    tmp_path: Path,
    cache: Path,
    whole: list[float],
    hangs: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    run_dir, told_s = tmp_path / "run", list[float]()
    monkeypatch.setattr("hetjax.training.recovery.notices.GRACE_S", 6.0)

    def stop() -> None:
        told_s.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    def lose_for_long() -> None:
        (hangs / "start").touch()  # its replacement hangs
        kill(run_dir, "right")
        threading.Timer(1.0, stop).start()

    between_steps(monkeypatch, lose_for_long)
    words = training(run_dir, cache, "--checkpoint.every", "1")
    assert main(words) == 4
    assert time.monotonic() - told_s[0] < 6.0 + 3.0  # the machine is shared
    (stopped,) = events(run_dir, "preempted")
    assert stopped["step"] in (0, 1, 2) and not processes_of(run_dir)
    (hangs / "start").unlink(missing_ok=True)  # if no replacement has started
    assert main(words) == 0
    assert losses(run_dir) == pytest.approx(whole, rel=1e-5)
