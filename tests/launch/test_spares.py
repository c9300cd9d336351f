# SPDX-License-Identifier: Apache-2.0
"""Worker processes that wait to be needed, and the ones that they become."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetjax.launch.launching import Processes
from hetjax.launch.spares import Command, Spares
from hetjax.runtime.worker.bootstrap import WorkerBootstrap, read_bootstrap

SOON_S, PATIENCE_S = 0.01, 60.0


def command(**variables: str) -> Command:
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    return Command(module="tests.launch.echoing_worker", environment=environment)


def bootstrap(worker: str) -> WorkerBootstrap:
    return WorkerBootstrap(worker=worker, controller="", listen="", secret=b"")


def wait_until(there: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not there():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.fixture
def spares() -> Iterator[Spares]:
    found = Spares(SOON_S)
    yield found
    found.end()


def kept(spares: Spares, made: Command) -> subprocess.Popen[str]:
    spares.keep("left", made)
    wait_until(lambda: "left" in spares._ready)
    return spares._ready["left"][1]


def test_a_spare_becomes_the_worker_it_is_told_to_be_with_that_worker_s_log(
    spares: Spares, tmp_path: Path
):
    made = command(HETJAX_TEST_WORD="blue")
    waiting = kept(spares, made)
    with Processes(logs=tmp_path) as processes:
        spare = spares.take("left", made)
        processes.start(bootstrap("left"), made, spare)
        assert processes.children == {"left": waiting} and waiting.wait() == 0
    pid, word, told = (tmp_path / "left.log").read_text().split(maxsplit=2)
    assert (int(pid), word) == (waiting.pid, "blue")
    assert read_bootstrap(told) == bootstrap("left")


def test_a_spare_is_taken_once_and_only_for_the_command_that_it_was_started_by(
    spares: Spares,
):
    first = kept(spares, command(CUDA_VISIBLE_DEVICES="0"))
    assert spares.take("left", command(CUDA_VISIBLE_DEVICES="1")) is None
    assert first.poll() is not None  # it would see another's device
    second = kept(spares, command())
    assert spares.take("right", command()) is None
    assert spares.take("left", command()) is second
    assert spares.take("left", command()) is None
    second.kill()
    second.wait()


def test_a_spare_that_cannot_wait_is_none(spares: Spares):
    broken = Command(module="no.such.module", environment=command().environment)
    spare = kept(spares, broken)
    assert spare.wait() != 0
    assert spares.take("left", broken) is None


def test_spares_end_with_their_controller_however_it_ends(
    spares: Spares, tmp_path: Path
):
    killed = kept(spares, command())
    spares.end()
    assert killed.poll() is not None
    lines = "from tests.launch.test_spares import *; spares = Spares(SOON_S)\n"
    lines += "print(kept(spares, command()).pid, flush=True); os._exit(1)"
    environment = dict(command().environment)
    told = subprocess.run(
        [sys.executable, "-c", lines], env=environment, capture_output=True, text=True
    )
    wait_until(lambda: not Path(f"/proc/{told.stdout.strip()}").exists())


def test_none_is_started_where_none_is_wanted_or_all_is_over(spares: Spares):
    never = Spares(0.0)
    never.keep("left", command())
    spares.end()
    spares.keep("left", command())
    for found in (never, spares):
        assert not found._timers and found.take("left", command()) is None


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
