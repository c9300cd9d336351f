# SPDX-License-Identifier: Apache-2.0
"""Any valid plan gives the loss and gradients of the model in one jit.

`pytest tests/runtime/test_same_numbers.py --plans 300` is the longer run.
"""

from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.comm.transport import InProcess, Tally
from hetjax.costs.plan_costs import costs_of
from hetjax.runtime.execution.commit import StepCommit
from hetjax.runtime.execution.executor import StepContext
from hetjax.runtime.execution.gradient_sync import LocalSync
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.schedule.programs.generate import rounds_of
from tests.runtime.charged import link_bytes, messages, sums
from tests.runtime.oracle import (
    assert_gradients_equal,
    keep_gradients,
    kept_gradients,
    oracle_gradients,
    random_batch,
)
from tests.runtime.random_plans import MAX_DEVICES, Case, interleaved_case, random_case
from tests.runtime.random_weights import random_params
from tests.short_runs import draws

pytestmark = pytest.mark.usefixtures("quick_compiling")

NODES = ("even", "odd")
LINKED = Cluster(
    name="linked",
    nodes=tuple(
        Node(name=n, device="H100-80GB-HBM3", count=MAX_DEVICES) for n in NODES
    ),
    links=(Link(between=NODES, bandwidth_gbit_per_s=1),),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "plan_seed" in metafunc.fixturenames:
        num_plans: Any = metafunc.config.getoption("plans")
        seeds = range(num_plans) if num_plans else draws(range(24), short=6)
        metafunc.parametrize("plan_seed", seeds)


def test_loss_and_gradients_of_random_plans_equal_those_of_one_jit(plan_seed: int):
    seed, case = plan_seed, random_case(plan_seed)
    params = random_params(case.model, seed)
    batch = random_batch(case.plan, case.model.vocab_size, seed)
    loss, expected = oracle_gradients(case.model, params, batch)
    runtime, result = run_of(case, params, seed)
    found = kept_gradients(runtime)
    assert result.loss() == pytest.approx(loss, rel=1e-5)
    assert_gradients_equal(found, expected)
    assert_charged(case, runtime)
    num_holders = {len(holders) for holders in found.values()}
    assert max(num_holders) >= len(case.plan.replicas)
    squares = sum(np.sum(np.square(g, dtype=np.float64)) for g in expected.values())
    assert result.grad_norm == pytest.approx(squares**0.5, rel=1e-5)


def test_stages_of_one_replica_may_share_their_devices():
    case = interleaved_case()
    params = random_params(case.model, 0)
    batch = random_batch(case.plan, case.model.vocab_size, 0)
    loss, expected = oracle_gradients(case.model, params, batch)
    result, found = run_once(case, params, 0)
    assert result.loss() == pytest.approx(loss, rel=1e-5)
    assert_gradients_equal(found, expected)
    # tied: the first and the last chunk hold it, which share devices
    assert len(found["embedding.table"]) == 2


def test_rounds_of_microbatches_through_interleaved_stages_equal_one_jit():
    seed, case = 102, random_case(102)
    rounds = [rounds_of(replica) for replica in case.plan.replicas]
    assert case.plan.schedule == "interleaved" and rounds[0] and rounds[0].size == 2
    test_loss_and_gradients_of_random_plans_equal_those_of_one_jit(seed)


@pytest.mark.parametrize("seed", [2, 4])
def test_the_same_plan_twice_is_bit_equal(seed: int):
    case = random_case(seed)
    params = random_params(case.model, seed)
    first, second = (run_once(case, params, seed) for _ in range(2))
    assert first[0].loss() == second[0].loss()
    assert first[0].grad_norm == second[0].grad_norm
    for path, gradients in first[1].items():
        np.testing.assert_array_equal(gradients, second[1][path])


class Watched(StageRuntime):
    """A runtime that keeps the transport and the sums of its last step."""

    last: StepContext

    def _step(self, *given: Any) -> StepContext:
        self.last = super()._step(*given)
        return self.last


def run_once(
    case: Case, params: dict[str, np.ndarray], seed: int
) -> tuple[StepCommit, dict[str, list[np.ndarray]]]:
    runtime, result = run_of(case, params, seed)
    return result, kept_gradients(runtime)


def run_of(
    case: Case, params: dict[str, np.ndarray], seed: int
) -> tuple[Watched, StepCommit]:
    nodes: dict[str, list[jax.Device]] = dict.fromkeys(NODES, jax.devices())
    runtime = Watched(case.plan, case.model, nodes, keep_gradients())
    runtime.restore(
        lambda entry: params.get(
            entry.name.removeprefix("params."), np.zeros(entry.shape, entry.dtype)
        )
    )
    batch = random_batch(case.plan, case.model.vocab_size, seed)
    return runtime, runtime.step(0, batch)


def assert_charged(case: Case, runtime: Watched) -> None:
    """Assert that costs charge the bytes sent between nodes for messages and sums."""
    transport, sync = runtime.last.transport, runtime.last.sync
    assert isinstance(transport, InProcess)
    assert isinstance(sync, LocalSync)
    costs = costs_of(
        case.plan, case.model, LINKED, dtype="float32", transport="in-process"
    )
    assert between(case, transport.sent) == link_bytes(messages(case, costs))
    assert between(case, sync.sent) == link_bytes(sums(costs))


def between(case: Case, sent: Tally) -> dict[str, float]:
    """Return bytes by link between nodes, from bytes by (from stage, to stage)."""
    node = {(r, s): stage.node for r, s, stage in case.plan.stages()}
    found: Counter[str] = Counter()
    for (link, _), size in sent.by_link_and_kind().items():
        source, target = (node[stage] for stage in link)  # pyright: ignore
        if source != target:
            found[f"{source}>{target}"] += size
    return dict(found)
