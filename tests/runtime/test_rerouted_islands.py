# SPDX-License-Identifier: Apache-2.0
"""Worker processes take over the samples of lost workers, and give them back."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.plans.plan import Plan
from hetjax.plans.rerouting import rerouted
from hetjax.runtime.control import recovery
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.control.rerouting import take_over
from hetjax.runtime.rpc.worker_connections import SocketConnections, WorkerLost
from tests.runtime.oracle import (
    assert_gradients_equal,
    oracle_gradients,
    random_batch,
)
from tests.runtime.random_plans import random_case
from tests.runtime.random_weights import random_params
from tests.runtime.test_islands import gradients, joined, started
from tests.runtime.worker_process import NODES
from tests.short_runs import rows_drawn


@pytest.fixture(scope="module")
def connections(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SocketConnections]:
    with started(NODES, tmp_path_factory.mktemp("logs")) as (connections, _):
        yield connections
        assert sorted(connections.workers) == sorted(NODES)


def without(plan: Plan, *nodes: str) -> Plan:
    found = rerouted(plan, nodes)
    assert found is not None and found != plan
    return found


def check_step(controller: Controller, seed: int, number: int, directory: Path) -> None:
    """Assert that a step has the loss and gradients of one jit on all participants."""
    for file in directory.glob("*.npz"):
        file.unlink()
    case, found = random_case(seed, NODES), controller.step(number)
    batch = random_batch(case.plan, case.model.vocab_size, number)
    params = random_params(case.model, seed)
    loss, expected = oracle_gradients(case.model, params, batch)
    assert found.loss() == pytest.approx(loss, rel=1e-5)
    assert_gradients_equal(gradients(directory), expected)
    squares = sum((value**2).sum() for value in expected.values())
    assert found.grad_norm == pytest.approx(float(squares) ** 0.5, rel=1e-5)


# Idle besides the lost worker: none (3), whole workers (1), stages of participants (13)
@pytest.mark.parametrize(
    ("seed", "lost"),
    rows_drawn([(1, "south"), (3, "north"), (13, "west")], short=1),
)
def test_others_take_over_and_give_back(
    connections: SocketConnections, tmp_path: Path, seed: int, lost: str
):
    controller = joined(connections, seed, tmp_path)
    plan, everybody = controller.plan, controller.workers
    check_step(controller, seed, 0, tmp_path)
    controller.reroute(without(plan, lost), everybody)
    assert lost not in controller.workers
    controller.connect()
    for number in (1, 2):
        check_step(controller, seed, number, tmp_path)
    held = recovery.in_memory(controller, connections.workers)
    newest = {found.worker for found in held if found.save[0] == 3}
    assert newest == set(controller.workers)
    controller.reroute(plan, everybody)
    controller.connect()
    storage = CheckpointStorage(directory=str(tmp_path / "checkpoints"))
    restored = recovery.restore(controller, held, storage)
    assert restored is not None and restored.step == 3
    check_step(controller, seed, 3, tmp_path)


def test_what_a_killed_worker_broke_off_is_done_again_by_those_that_are_left(
    tmp_path: Path,
):
    seed, lost = 1, "south"
    with started(NODES, tmp_path / "logs") as (connections, processes):
        controller = joined(connections, seed, tmp_path)
        check_step(controller, seed, 0, tmp_path)
        processes.children[lost].send_signal(signal.SIGKILL)
        with pytest.raises(WorkerLost):
            controller.step(1)
        left = connections.workers
        assert recovery.finish_step(connections, left) is None
        assert take_over(controller, controller.plan, left) == 1
        assert controller.workers == ["west"]
        check_step(controller, seed, 1, tmp_path)
        assert sorted(connections.workers) == ["east", "north", "west"]


def test_a_step_that_one_has_committed_is_finished_before_others_take_over(
    connections: SocketConnections, tmp_path: Path
):
    controller = joined(connections, 13, tmp_path)
    commit = controller.step(0)
    left = [worker for worker in NODES if worker != "west"]
    taking_part = [worker for worker in left if worker in controller.workers]
    assert recovery.finish_step(connections, taking_part) == commit
    assert take_over(controller, controller.plan, left) == 1
    assert controller.workers == ["south"]
    # rerouting discards commits, so no participant has a step to finish
    assert recovery.finish_step(connections, taking_part) is None


def test_nobody_takes_over_where_no_replica_is_whole_or_states_are_of_other_steps(
    connections: SocketConnections, tmp_path: Path
):
    controller = joined(connections, 3, tmp_path)
    plan = controller.plan
    check_step(controller, 3, 0, tmp_path)
    assert take_over(controller, plan, ["east", "west"]) is None
    check_step(controller, 3, 1, tmp_path)  # nothing has changed
    assert take_over(controller, plan, ["east", "south"]) is not None
    check_step(controller, 3, 2, tmp_path)
    controller.reroute(plan, NODES)  # its state has not arrived yet
    assert take_over(controller, plan, NODES) is None
