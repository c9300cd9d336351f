# SPDX-License-Identifier: Apache-2.0
"""Standby worker processes, and the workers that they become."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetjax.launchers.local_processes import Processes
from hetjax.launchers.warm_standby import WarmStandby, WorkerCommand
from hetjax.runtime.worker.bootstrap import WorkerBootstrap, read_bootstrap

SOON_S, PATIENCE_S = 0.01, 60.0


def command(**variables: str) -> WorkerCommand:
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    return WorkerCommand(
        module="tests.launchers.echoing_worker", environment=environment
    )


def bootstrap(worker: str) -> WorkerBootstrap:
    return WorkerBootstrap(worker=worker, controller="", listen="", secret=b"")


def wait_until(there: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not there():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.fixture
def standby() -> Iterator[WarmStandby]:
    found = WarmStandby(SOON_S)
    yield found
    found.end()


def kept(standby: WarmStandby, made: WorkerCommand) -> subprocess.Popen[str]:
    standby.prepare("left", made)
    wait_until(lambda: "left" in standby._ready)
    return standby._ready["left"][1]


def test_a_process_on_standby_becomes_the_worker_it_is_told_to_be_with_its_log(
    standby: WarmStandby, tmp_path: Path
):
    made = command(HETJAX_TEST_WORD="blue")
    waiting = kept(standby, made)
    with Processes(logs=tmp_path) as processes:
        process = standby.claim("left", made)
        processes.start(bootstrap("left"), made, process)
        assert processes.children == {"left": waiting} and waiting.wait() == 0
    pid, word, told = (tmp_path / "left.log").read_text().split(maxsplit=2)
    assert (int(pid), word) == (waiting.pid, "blue")
    assert read_bootstrap(told) == bootstrap("left")


def test_it_is_claimed_once_and_only_for_the_command_that_it_was_started_by(
    standby: WarmStandby,
):
    first = kept(standby, command(CUDA_VISIBLE_DEVICES="0"))
    assert standby.claim("left", command(CUDA_VISIBLE_DEVICES="1")) is None
    assert first.poll() is not None  # it would see another's device
    second = kept(standby, command())
    assert standby.claim("right", command()) is None
    assert standby.claim("left", command()) is second
    assert standby.claim("left", command()) is None
    second.kill()
    second.wait()


def test_one_that_cannot_wait_is_none(standby: WarmStandby):
    broken = WorkerCommand(module="no.such.module", environment=command().environment)
    process = kept(standby, broken)
    assert process.wait() != 0
    assert standby.claim("left", broken) is None


def test_all_end_with_their_controller_however_it_ends(
    standby: WarmStandby, tmp_path: Path
):
    killed = kept(standby, command())
    standby.end()
    assert killed.poll() is not None
    lines = f"from {__name__} import *; standby = WarmStandby(SOON_S)\n"
    lines += "print(kept(standby, command()).pid, flush=True); os._exit(1)"
    environment = dict(command().environment)
    told = subprocess.run(
        [sys.executable, "-c", lines], env=environment, capture_output=True, text=True
    )
    wait_until(lambda: not Path(f"/proc/{told.stdout.strip()}").exists())


def test_none_is_started_where_none_is_wanted_or_all_is_over(standby: WarmStandby):
    never = WarmStandby(0.0)
    never.prepare("left", command())
    standby.end()
    standby.prepare("left", command())
    for found in (never, standby):
        assert not found._timers and found.claim("left", command()) is None


def test_workers_that_are_started_again_and_again_leave_no_descriptor_open(
    tmp_path: Path,
):
    open_ones = lambda: len(list(Path("/proc/self/fd").iterdir()))  # noqa: E731
    with Processes(logs=tmp_path) as processes:
        processes.start(bootstrap("left"), command())
        before = open_ones()
        for _ in range(3):
            processes.start(bootstrap("left"), command())
        assert open_ones() == before
