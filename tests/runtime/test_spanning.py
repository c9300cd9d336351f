# SPDX-License-Identifier: Apache-2.0
"""Stages that span the two hosts of a node: the numbers of one jit, and lost hosts."""

import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.comm.wire import SUMS
from hetjax.costs.plan_costs import costs_of
from hetjax.errors import BadInput
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.control.rerouting import take_over
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.runtime.rpc.schema import Listen
from hetjax.runtime.rpc.worker_connections import SocketConnections, WorkerLost
from tests.runtime.charged import messages, sums
from tests.runtime.oracle import (
    assert_gradients_equal,
    keep_gradients,
    oracle_gradients,
    random_batch,
)
from tests.runtime.random_plans import Case
from tests.runtime.random_weights import random_params
from tests.runtime.spanning_plans import (
    CASES,
    NODES,
    SINGLE,
    SLICE,
    WORKERS,
    spanning_case,
)
from tests.runtime.test_islands import MESSAGES, SILENCE_S, gradients, sent, started
from tests.short_runs import draws, rows_drawn

SEED = 5


@pytest.fixture(scope="module")
def connections(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SocketConnections]:
    with started(WORKERS, tmp_path_factory.mktemp("logs")) as (connections, processes):
        yield connections
        assert sorted(connections.workers) == sorted(WORKERS)
        controller = Controller(spanning_case("data").plan, connections, NODES)
        controller.end()
        codes = {w: child.wait(10) for w, child in processes.children.items()}
        assert codes == dict.fromkeys(WORKERS, 0)


def joined(
    connections: SocketConnections, case: str, directory: Path, **settings: int
) -> Controller:
    controller = Controller(spanning_case(case).plan, connections, NODES)
    own = {"case": case, "seed": SEED, "directory": str(directory)}
    controller.build(own | settings)
    controller.connect()
    return controller


@pytest.mark.parametrize("name", draws(CASES, short=2))
def test_stages_over_two_hosts_give_the_gradients_of_one_jit(
    connections: SocketConnections, tmp_path: Path, name: str
):
    case = spanning_case(name)
    controller = joined(connections, name, tmp_path)
    batch = random_batch(case.plan, case.model.vocab_size, SEED)
    params = random_params(case.model, SEED)
    loss, expected = oracle_gradients(case.model, params, batch)
    first = controller.step(SEED)
    held = gradients(tmp_path)
    assert first.loss() == pytest.approx(loss, rel=1e-5)
    assert_gradients_equal(held, expected)
    assert_charged(case, tmp_path)
    assert controller.evaluate([SEED]) == pytest.approx(loss, rel=1e-5)
    # a repetition gives the same bits
    assert controller.step(SEED) == first
    for path, values in gradients(tmp_path).items():
        np.testing.assert_array_equal(values, held[path])


@pytest.mark.parametrize("left", [SLICE, SINGLE], ids=lambda node: node.name)
def test_one_replica_takes_over_from_the_other_over_both_hosts_or_from_them(
    connections: SocketConnections, tmp_path: Path, left: Node
):
    case = spanning_case("replicas")
    controller = joined(connections, "replicas", tmp_path)
    controller.step(0)
    assert take_over(controller, controller.plan, left.workers) is not None
    assert controller.workers == [*left.workers]
    for file in tmp_path.glob("*.npz"):
        file.unlink()
    batch = random_batch(case.plan, case.model.vocab_size, SEED)
    params = random_params(case.model, SEED)
    loss, expected = oracle_gradients(case.model, params, batch)
    assert controller.step(SEED).loss() == pytest.approx(loss, rel=1e-5)
    assert_gradients_equal(gradients(tmp_path), expected)
    assert controller.evaluate([SEED]) == pytest.approx(loss, rel=1e-5)


def assert_charged(case: Case, directory: Path) -> None:
    """Assert that costs charge the bytes on network cards.

    For messages, the test compares the fullest card.
    """
    cluster = Cluster(
        name="cards",
        nodes=tuple(replace(node, device="H100-80GB-HBM3") for node in NODES),
    )
    costs = costs_of(case.plan, case.model, cluster, dtype="float32")
    assert on_cards(sent(directory, [SUMS])) == of_cards(sums(costs))
    found, charged = (
        on_cards(sent(directory, MESSAGES)),
        of_cards(messages(case, costs)),
    )
    # a route names only one of a stage's hosts if all hosts get the same
    assert max(found.values(), default=0) == max(charged.values(), default=0)


def on_cards(by_link: dict[str, float]) -> dict[str, float]:
    """Return the bytes by network card, from bytes by "worker>worker"."""
    cards: Counter[str] = Counter()
    for link, size in by_link.items():
        source, target = (worker.replace("@", "/") for worker in link.split(">"))
        cards[f"{card(source)}/out"] += size  # pyright: ignore
        cards[f"{card(target)}/in"] += size  # pyright: ignore
    return dict(cards)


def card(worker: str) -> str:
    """Return the trunks' name of a worker: "slice/1" is "slice:host1"."""
    return worker.replace("/", ":host")


def of_cards(charged: Iterable[tuple[str, float]]) -> dict[str, float]:
    names = {card(worker) for worker in WORKERS}
    cards: Counter[str] = Counter()
    for trunk, size in charged:
        if trunk.rpartition("/")[0] in names:
            cards[trunk] += size  # pyright: ignore
    return dict(cards)


def test_samples_over_two_hosts_are_those_of_one_process(
    connections: SocketConnections, tmp_path: Path, quick_compiling: None
):
    case = spanning_case("replicas")
    controller = joined(connections, "replicas", tmp_path)
    devices = {"slice": jax.devices()[:4], "single": jax.devices()[4:6]}
    whole = StageRuntime(case.plan, case.model, devices, keep_gradients())
    params = random_params(case.model, SEED)
    whole.restore(
        lambda entry: params.get(
            entry.name.removeprefix("params."), np.zeros(entry.shape, entry.dtype)
        )
    )
    tokens = [3, 1, 4, 1, 5]
    expected = whole.next_logits(0, tokens)
    assert expected is not None
    np.testing.assert_allclose(
        controller.next_logits(tokens), expected, rtol=1e-4, atol=1e-5
    )


def test_pulls_do_not_reach_stages_on_several_hosts(
    connections: SocketConnections, tmp_path: Path
):
    controller = joined(connections, "data", tmp_path)
    with pytest.raises(BadInput, match="'slice' has hosts = 2"):
        controller.connect("transfer")


@pytest.mark.parametrize(
    ("lost", "how"),
    rows_drawn(
        [
            (SLICE.workers[0], signal.SIGKILL),
            (SLICE.workers[1], signal.SIGKILL),
            (SLICE.workers[1], signal.SIGSTOP),
        ],
        short=1,
    ),
)
def test_a_lost_host_is_told_of_and_its_node_goes_with_it(
    tmp_path: Path, lost: str, how: int
):
    with started(WORKERS, tmp_path / "logs") as (connections, processes):
        controller = joined(connections, "data", tmp_path)
        controller.step(0)
        children = processes.children
        children[lost].send_signal(how)
        begin_s = time.monotonic()
        with pytest.raises(WorkerLost) as told:
            controller.step(1)
        limit_s = 2 if how == signal.SIGKILL else SILENCE_S + 2
        assert time.monotonic() - begin_s < limit_s
        assert told.value.worker == lost
        assert SINGLE.name in told.value.reports
        for mate in SLICE.workers:
            if mate != lost:
                assert ended(children[mate])
        until_s = time.monotonic() + 10  # a process may end before its connection
        while connections.workers != [SINGLE.name] and time.monotonic() < until_s:
            time.sleep(0.01)
        assert connections.workers == [SINGLE.name]
        assert connections.ask({SINGLE.name: Listen()})
        children[lost].send_signal(signal.SIGCONT)
        assert ended(children[lost])


def ended(child: subprocess.Popen[str]) -> bool:
    return child.wait(10) != 0


def test_hosts_are_in_step_after_one_alone_aborted(
    connections: SocketConnections, tmp_path: Path
):
    """The other host has to do all work that one host got before the abort."""
    before = joined(connections, "tensor", tmp_path).step(SEED)
    controller = joined(connections, "tensor", tmp_path, half_sent=1)
    with pytest.raises(WorkerLost, match="'single' is gone"):
        controller.step(SEED)
    controller.connect()
    assert controller.step(SEED) == before
    assert controller.evaluate([SEED]) == pytest.approx(before.loss(), rel=1e-6)
