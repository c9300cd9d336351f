# SPDX-License-Identifier: Apache-2.0
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hetjax.checkpoint.reader import Checkpoint, steps
from hetjax.checkpoint.writer import CheckpointWriter
from tests.checkpoint.values import state_of
from tests.short_runs import draws

NUM_ENTRIES, SIZE = 12, 4096

# One process imports once, then forks a trainer that saves forever per line it reads.
_TRAINERS = f"""
import os, sys
from pathlib import Path
import jax
from hetjax.checkpoint.writer import CheckpointWriter
from tests.checkpoint.values import state_of
jax.config.update("jax_platforms", "cpu")
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        with CheckpointWriter(Path(line.strip()), "embedded", keep=2) as writer:
            for step in range(1, 1000):
                state = state_of(step, num_entries={NUM_ENTRIES}, size={SIZE})
                writer.save(step, state, host={{"step": step}})
                writer.wait()
                print("committed", step, flush=True)
    print("pid", pid, flush=True)
    os.waitpid(pid, 0)
    print("gone", pid, flush=True)
"""


@pytest.fixture(scope="module")
def trainers() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _TRAINERS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        yield process
        process.kill()


def read_until(trainers: subprocess.Popen[str], word: str) -> tuple[int, int]:
    """Return the number after the word, and the last step committed before (or 0)."""
    assert trainers.stdout is not None
    committed = 0
    for line in trainers.stdout:
        found, number = line.split()
        if found == "committed":
            committed = int(number)
        if found == word:
            return int(number), committed
    raise AssertionError(f"the trainer ended before it said {word}")


@pytest.mark.parametrize("trial", draws(range(5), short=2))
def test_a_kill_at_any_moment_of_a_save_costs_at_most_that_save(
    trainers: subprocess.Popen[str], trial: int, tmp_path: Path
) -> None:
    assert trainers.stdin is not None
    print(tmp_path, file=trainers.stdin, flush=True)
    pid, _ = read_until(trainers, "pid")
    read_until(trainers, "committed")
    time.sleep(random.Random(trial).uniform(0, 0.3))
    os.kill(pid, signal.SIGKILL)
    _, committed = read_until(trainers, "gone")

    newest, last = steps(tmp_path)[-1], max(committed, 1)
    assert newest in (last, last + 1)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.step == newest and checkpoint.host == {"step": newest}
    for entry, value in state_of(newest, num_entries=NUM_ENTRIES, size=SIZE):
        np.testing.assert_array_equal(checkpoint.read(entry), value)

    before = steps(tmp_path)
    with CheckpointWriter(tmp_path, "embedded", keep=2) as writer:
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {f"step_{step:08d}" for step in before}
        assert len(list(tmp_path.glob("*/*/*"))) == 2 * len(before)
        writer.save(newest + 1, state_of(newest + 1), host={})
    assert steps(tmp_path)[-1] == newest + 1
