# SPDX-License-Identifier: Apache-2.0
"""Plans over several worker processes: the numbers of one jit, and lost workers."""

import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hetjax.runtime.control import Crew
from hetjax.runtime.fleet import Fleet, FleetStep
from hetjax.runtime.processes import Processes
from hetjax.runtime.serving import Post
from tests.runtime.oracle import (
    assert_gradients_equal,
    oracle_gradients,
    random_batch,
)
from tests.runtime.random_plans import random_case
from tests.runtime.random_weights import random_params

NODES = ("east", "north", "south", "west")
SILENCE_S = 4.0
START_S = 60.0


@contextmanager
def started(
    nodes: Sequence[str], logs: Path, address: str = "127.0.0.1:0"
) -> Iterator[tuple[Crew, Processes]]:
    """Worker processes of these names that have called their controller."""
    secret = secrets.token_bytes(32)
    crew = Crew(address, secret, SILENCE_S)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with Processes(logs=logs) as processes:
        try:
            for node in nodes:
                post = Post(
                    worker=node,
                    controller=crew.address,
                    listen="127.0.0.1:0",
                    secret=secret,
                    silence_s=SILENCE_S,
                )
                command = [sys.executable, "-m", "tests.runtime.worker_process"]
                processes.start(post, command, environment)
            crew.wait_for(nodes, START_S, processes.check)
            yield crew, processes
        finally:
            crew.close()


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with started(NODES, tmp_path_factory.mktemp("logs")) as (crew, _):
        yield crew


def run_once(crew: Crew, seed: int, directory: Path) -> FleetStep:
    fleet = Fleet(random_case(seed, NODES).plan, crew)
    fleet.build({"seed": seed, "nodes": NODES, "directory": str(directory)})
    fleet.connect()
    return fleet.step(seed)


def gradients(directory: Path) -> dict[str, list[np.ndarray]]:
    """By path, the gradients that all holders in all workers kept."""
    found: dict[str, list[np.ndarray]] = {}
    for file in sorted(directory.glob("*.npz")):
        for name, value in np.load(file).items():
            found.setdefault(name.rpartition("/")[0], []).append(value)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_random_plans_over_processes_give_the_gradients_of_one_jit(
    crew: Crew, tmp_path: Path, seed: int
):
    case = random_case(seed, NODES)
    result = run_once(crew, seed, tmp_path)
    batch = random_batch(case.plan, case.model.vocab_size, seed)
    loss, expected = oracle_gradients(
        case.model, random_params(case.model, seed), batch
    )
    assert result.loss() == pytest.approx(loss, rel=1e-5)
    assert_gradients_equal(gradients(tmp_path), expected)
