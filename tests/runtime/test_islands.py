# SPDX-License-Identifier: Apache-2.0
"""Plans over several worker processes: the numbers of one jit, and lost workers.

`pytest tests/runtime/test_islands.py --island-plans 50` is the longer run.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.comm.wire import SUMS
from hetjax.costs.costs import Costs
from hetjax.costs.network.wire_bytes import Transport
from hetjax.costs.plan_costs import costs_of
from hetjax.errors import BadInput
from hetjax.launchers.local_processes import Processes
from hetjax.launchers.warm_standby import WorkerCommand
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.execution.commit import StepCommit
from hetjax.runtime.rpc.schema import Listen, Lost, TransportName
from hetjax.runtime.rpc.worker_connections import SocketConnections, WorkerLost
from hetjax.runtime.worker.bootstrap import WorkerBootstrap
from tests.runtime.charged import link_bytes, messages, sums
from tests.runtime.oracle import (
    assert_gradients_equal,
    oracle_gradients,
    random_batch,
)
from tests.runtime.packed_cases import expected as packed_expected
from tests.runtime.packed_cases import packed_batch, packed_case
from tests.runtime.random_plans import Case, random_case
from tests.runtime.random_weights import random_params
from tests.runtime.worker_process import FAILING_STEP, NODES, REFUSED_STEP
from tests.short_runs import draws

SILENCE_S = 3.0
MESSAGES = (0, 1)  # kinds: forward and backward
ALL_LINKED = Cluster(
    name="linked",
    nodes=tuple(Node(name=n, device="H100-80GB-HBM3", count=16) for n in NODES),
    links=tuple(
        Link(between=ends, bandwidth_gbit_per_s=1) for ends in combinations(NODES, 2)
    ),
)
SPREAD = 1  # a seed whose plan has stages on all nodes


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "island_seed" in metafunc.fixturenames:
        num_plans: Any = metafunc.config.getoption("island_plans")
        seeds = range(num_plans) if num_plans else draws(range(4), short=1)
        metafunc.parametrize("island_seed", seeds)


@contextmanager
def started(
    nodes: Sequence[str], logs: Path, address: str = "127.0.0.1:0"
) -> Iterator[tuple[SocketConnections, Processes]]:
    """Yield worker processes of these names that have called their controller."""
    secret = secrets.token_bytes(32)
    connections = SocketConnections(address, secret, SILENCE_S)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with Processes(logs=logs) as processes:
        try:
            for node in nodes:
                bootstrap = WorkerBootstrap(
                    worker=node,
                    controller=connections.address,
                    listen="127.0.0.1:0",
                    secret=secret,
                    silence_s=SILENCE_S,
                )
                command = WorkerCommand(
                    module="tests.runtime.worker_process", environment=environment
                )
                processes.start(bootstrap, command)
            connections.wait_for(nodes, lambda: processes.check(nodes))
            yield connections, processes
        finally:
            connections.close()


@pytest.fixture(scope="module")
def connections(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SocketConnections]:
    with started(NODES, tmp_path_factory.mktemp("logs")) as (connections, _):
        yield connections
        assert sorted(connections.workers) == sorted(NODES)


def joined(
    connections: SocketConnections,
    seed: int,
    directory: Path,
    transport: TransportName = "sockets",
) -> Controller:
    controller = Controller(random_case(seed, NODES).plan, connections)
    controller.build({"seed": seed, "nodes": NODES, "directory": str(directory)})
    controller.connect(transport)
    return controller


def run_once(
    connections: SocketConnections,
    seed: int,
    directory: Path,
    transport: TransportName = "sockets",
) -> StepCommit:
    return joined(connections, seed, directory, transport).step(seed)


def gradients(directory: Path) -> dict[str, list[np.ndarray]]:
    """Return the gradients that all holders in all workers kept, by path."""
    found: dict[str, list[np.ndarray]] = {}
    for file in sorted(directory.glob("*.npz")):
        for name, value in np.load(file).items():
            found.setdefault(name.rpartition("/")[0], []).append(value)
    return found


def sent(directory: Path, kinds: Container[int]) -> dict[str, float]:
    """Return the bytes of these kinds by link, as the workers counted them."""
    found: dict[str, float] = {}
    for file in sorted(directory.glob("*.json")):
        for receiver, kind, size in json.loads(file.read_text()):
            if kind in kinds:
                link = f"{file.stem}>{receiver}"
                found[link] = found.get(link, 0) + size
    return found


def linked_costs(case: Case, transport: Transport) -> Costs:
    return costs_of(
        case.plan, case.model, ALL_LINKED, dtype="float32", transport=transport
    )


@pytest.mark.parametrize("transport", ["sockets", "transfer"])
def test_random_plans_over_processes_give_the_gradients_of_one_jit(
    connections: SocketConnections,
    tmp_path: Path,
    island_seed: int,
    transport: TransportName,
):
    seed, case = island_seed, random_case(island_seed, NODES)
    result = run_once(connections, seed, tmp_path, transport)
    batch = random_batch(case.plan, case.model.vocab_size, seed)
    loss, expected = oracle_gradients(
        case.model, random_params(case.model, seed), batch
    )
    assert result.loss() == pytest.approx(loss, rel=1e-5)
    assert_gradients_equal(gradients(tmp_path), expected)
    links = linked_costs(case, transport)
    assert sent(tmp_path, MESSAGES) == link_bytes(messages(case, links))
    assert sent(tmp_path, [SUMS]) == link_bytes(sums(links))


@pytest.mark.nightly
def test_packed_sequences_over_processes_give_the_gradients_of_documents_alone(
    connections: SocketConnections, tmp_path: Path
):
    case = packed_case(SPREAD, NODES)  # meshes of 2 x 2, two replicas
    controller = Controller(case.plan, connections)
    settings = {"seed": SPREAD, "nodes": NODES, "directory": str(tmp_path)}
    controller.build({**settings, "packed": True})
    controller.connect()
    batch = packed_batch(case, 5)
    loss, alone = packed_expected(case.model, random_params(case.model, SPREAD), batch)
    assert controller.step(5).loss() == pytest.approx(loss, rel=1e-5)
    assert_gradients_equal(gradients(tmp_path), alone)
    links = linked_costs(case, "sockets")
    assert sent(tmp_path, MESSAGES) == link_bytes(messages(case, links))


def test_the_same_plan_twice_is_bit_equal(
    connections: SocketConnections, tmp_path: Path
):
    first, second = (run_once(connections, 4, tmp_path) for _ in range(2))
    held = gradients(tmp_path)
    assert first == second
    assert run_once(connections, 4, tmp_path).grad_norm == first.grad_norm
    for path, values in gradients(tmp_path).items():
        np.testing.assert_array_equal(values, held[path])


def test_an_evaluation_gives_the_loss_and_changes_nothing(
    connections: SocketConnections, tmp_path: Path
):
    controller, case = joined(connections, 3, tmp_path), random_case(3, NODES)
    batch = random_batch(case.plan, case.model.vocab_size, 3)
    loss, _ = oracle_gradients(case.model, random_params(case.model, 3), batch)
    assert controller.evaluate([3]) == pytest.approx(loss, rel=1e-5)
    assert controller.evaluate([3, 3]) == pytest.approx(loss, rel=1e-5)
    assert controller.step(3).loss() == pytest.approx(loss, rel=1e-5)


def test_a_worker_that_fails_is_named_and_all_go_on_afterwards(
    connections: SocketConnections, tmp_path: Path
):
    controller = joined(connections, SPREAD, tmp_path)
    before = controller.step(0)
    with pytest.raises(WorkerLost, match=r"'east' failed: ValueError: no such batch"):
        controller.step(FAILING_STEP)
    controller.connect()
    assert controller.step(0) == before
    got = rf"got: step {REFUSED_STEP} \(worker east\)\nallowed: any other"
    with pytest.raises(BadInput, match=got):
        controller.step(REFUSED_STEP)
    controller.connect()
    assert controller.step(0) == before


@pytest.mark.parametrize("how", draws([signal.SIGSTOP, signal.SIGKILL], short=1))
def test_survivors_of_a_lost_worker_report_it_and_wait(tmp_path: Path, how: int):
    with started(NODES, tmp_path / "logs") as (connections, processes):
        controller = joined(connections, SPREAD, tmp_path)
        controller.step(0)
        lost = processes.children["south"]
        lost.send_signal(how)
        begin_s = time.monotonic()
        with pytest.raises(WorkerLost) as told:
            controller.step(1)
        limit_s = 2 if how == signal.SIGKILL else SILENCE_S + 2
        assert time.monotonic() - begin_s < limit_s
        assert told.value.worker == "south"
        survivors = [node for node in NODES if node != "south"]
        assert sorted(told.value.reports) == survivors
        for report in told.value.reports.values():
            assert isinstance(report, Lost) and report.worker == "south"
        assert sorted(connections.workers) == survivors
        # they are alive and accept a request of a later epoch
        assert sorted(connections.ask({n: Listen() for n in survivors})) == survivors
        lost.send_signal(signal.SIGCONT)
        lost.wait(10)  # a worker that was given up ends when it wakes


def test_no_worker_outlives_its_controller(tmp_path: Path):
    script = (
        "import sys, time; from pathlib import Path; "
        "from tests.runtime.test_islands import started\n"
        "with started(['east', 'west'], Path(sys.argv[1])) as (_, processes):\n"
        "    print(*(c.pid for c in processes.children.values()), flush=True)\n"
        "    time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    controller = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    assert controller.stdout is not None
    workers = [int(pid) for pid in controller.stdout.readline().split()]
    controller.kill()
    controller.wait()
    end_s = time.monotonic() + 10
    while any(map(is_running, workers)) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert len(workers) == 2 and not any(map(is_running, workers))


def is_running(pid: int) -> bool:
    """Return whether the process exists and is no unreaped zombie."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except FileNotFoundError:
        return False
