# SPDX-License-Identifier: Apache-2.0
"""Cost and goodput of plans: whole nodes are paid, and losses cost lost work."""

from dataclasses import replace
from random import Random

import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.plan_costs import usd_per_hour
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.objectives import (
    Objective,
    Wish,
    expected_goodput,
    promise,
    score,
    survives,
    within,
)
from hetjax.planner.model.problem import Option
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.seating import UnplacedReplica, place
from hetjax.planner.search.find import find_plan
from hetjax.planner.search.infeasible import why_infeasible
from hetjax.plans.plan import Plan
from tests.planner.search.test_replan import two_replicas
from tests.planner.whole_space import two_kinds


def one_pipeline(request: PlanRequest) -> Plan:
    """Return a plan with half of the layers on a device of each node."""
    fast, slow = Option(device_class=0), Option(device_class=1)
    stages = ((fast, (0, 2)), (slow, (2, 4)))
    plan = place(
        request, [UnplacedReplica(num_microbatches=8, microbatch_size=1, stages=stages)]
    )
    assert plan is not None
    return plan


def test_a_node_is_rented_whole() -> None:
    request = two_kinds()
    cluster = request.cluster
    # one device of two on each node
    assert usd_per_hour(one_pipeline(request), cluster) == pytest.approx(20.2)
    both = two_replicas(request)
    assert usd_per_hour(both, cluster) == pytest.approx(20.2)
    slow = replace(both, replicas=both.replicas[1:])
    assert usd_per_hour(slow, cluster) == pytest.approx(0.2)
    # the catalogue prices each device
    node = Node(name="fast", device="T4", count=4)
    found = usd_per_hour(slow, Cluster(name="t4", nodes=(replace(node, name="slow"),)))
    assert found == pytest.approx(4 * 0.526)


def test_the_second_device_of_a_rented_node_is_used() -> None:
    cheap = find_plan(two_kinds(), Objective(wish="cost"), local_work=5_000).best.plan
    used = {(s.node, d) for _, _, s in cheap.stages() for d in s.devices}
    assert used == {("slow", 0), ("slow", 1)}


def shaky(request: PlanRequest, per_hour: dict[str, float]) -> Cluster:
    nodes = tuple(
        replace(node, preemptions_per_hour=per_hour.get(node.name))
        for node in request.cluster.nodes
    )
    return replace(request.cluster, nodes=nodes)


def test_state_survives_where_other_nodes_hold_every_layer() -> None:
    request = two_kinds()
    both, one = two_replicas(request), one_pipeline(request)
    assert survives(both, "fast") and survives(both, "slow")
    assert not survives(one, "fast") and not survives(one, "slow")
    predicted = evaluate_plan(request, both)
    cluster = shaky(request, {"fast": 1.0})
    rare, often = (
        expected_goodput(predicted, cluster, Objective(checkpoint_every_s=s))
        for s in (60, 6000)
    )
    assert rare == often < 1.0
    alone = evaluate_plan(request, one)
    rare, often = (
        expected_goodput(alone, cluster, Objective(checkpoint_every_s=s))
        for s in (60, 6000)
    )
    assert often < rare < 1.0


@pytest.mark.parametrize("plan_of", [two_replicas, one_pipeline])
def test_goodput_is_what_a_simulated_month_of_losses_leaves(plan_of) -> None:
    request = two_kinds()
    predicted = evaluate_plan(request, plan_of(request))
    rates = {"fast": 0.4, "slow": 0.8}
    objective = Objective(recovery_s=100.0, checkpoint_every_s=400.0, node_back_s=900.0)
    found = expected_goodput(predicted, shaky(request, rates), objective)
    tflops = {"fast": 0.1, "slow": 0.03}
    used = {(s.node, d) for _, _, s in predicted.plan.stages() for d in s.devices}
    power = {name: tflops[name] * sum(n == name for n, _ in used) for name in rates}
    state = {name: survives(predicted.plan, name) for name in rates}
    assert found == pytest.approx(done(power, state, rates, objective), rel=0.02)


def done(
    power: dict[str, float],
    survives: dict[str, bool],
    per_hour: dict[str, float],
    objective: Objective,
) -> float:
    """Return the share of an undisturbed cluster's work that counts."""
    r, num_s = Random(1), 1_000_000
    back_s = dict.fromkeys(power, 0)
    paused_s = since_saved = saved_work = counted = 0.0
    for second in range(num_s):
        there = {name for name in power if back_s[name] <= second}
        for name in there:
            if r.random() < per_hour[name] / 3600:
                back_s[name] = second + int(objective.node_back_s)
                paused_s = objective.recovery_s
                if not survives[name]:
                    saved_work = 0.0
        if paused_s > 0:
            paused_s -= 1
            continue
        saved_work += sum(power[name] for name in there)
        since_saved += 1
        if since_saved >= objective.checkpoint_every_s:
            counted, saved_work, since_saved = counted + saved_work, 0.0, 0.0
    return counted / num_s / sum(power.values())


def test_a_plan_without_a_price_is_not_within_the_wish_for_cost():
    request = two_kinds()
    nodes = tuple(replace(n, price_per_hour=None) for n in request.cluster.nodes)
    free = replace(request, cluster=replace(request.cluster, nodes=nodes))
    for of, is_within in ((request, True), (free, False)):
        found = evaluate_plan(of, one_pipeline(of))
        assert within(found, Objective(wish="cost")) == is_within
        assert within(found, Objective(wish="time"))
    told = why_infeasible(free, Objective(wish="cost"))
    assert "no plan on devices whose price is known" in told.got
    assert "made-up-fast, made-up-slow" in told.allowed
    assert "price_per_hour" in told.fix


@pytest.mark.parametrize("wish", ["time", "cost", "goodput"])
def test_another_schedule_is_expected_to_fill_half_of_what_the_busiest_wait(
    wish: Wish,
) -> None:
    request, objective = two_kinds(), Objective(wish=wish)
    found = evaluate_plan(request, one_pipeline(request))
    busiest = max(share.busy_s for share in found.simulation.shares.values())
    step_s = found.simulation.step_time_s
    assert 0 < busiest < step_s
    now = score(found, request.cluster, objective)
    promised = promise(found, request.cluster, objective)
    assert promised / now == pytest.approx(1 - (step_s - busiest) / step_s / 2)
