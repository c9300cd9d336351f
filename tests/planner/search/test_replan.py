# SPDX-License-Identifier: Apache-2.0
"""Plans for a changed cluster, and what moving to them costs."""

from dataclasses import replace
from itertools import combinations

import pytest

from hetjax.cluster.cluster import Cluster, Link, Node, part_of
from hetjax.costs.network.moved_state import fetched_bytes, fetching_s
from hetjax.costs.slowness.known import slowness
from hetjax.models.model import parameter_count, tensor_sizes
from hetjax.models.named import TypedName, load_named
from hetjax.planner.model.evaluator import PlanEvaluator, evaluate_plan
from hetjax.planner.model.objectives import Objective
from hetjax.planner.model.problem import Option
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.seating import UnplacedReplica, place
from hetjax.planner.model.simplicity import complexity
from hetjax.planner.search.find import Search, find_plan
from hetjax.planner.search.in_parts import in_parts
from hetjax.planner.search.replan import repaired, replan, survivors
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.plans.validation import validate_plan
from tests.planner.whole_space import two_kinds


def two_replicas(request: PlanRequest) -> Plan:
    """Return a plan of two stages on the fast node and one on a slow device."""
    fast, slow = Option(device_class=0), Option(device_class=1)
    plan = place(
        request,
        [
            UnplacedReplica(
                num_microbatches=6,
                microbatch_size=1,
                stages=((fast, (0, 2)), (fast, (2, 4))),
            ),
            UnplacedReplica(
                num_microbatches=2, microbatch_size=1, stages=((slow, (0, 4)),)
            ),
        ],
    )
    assert plan is not None
    return plan


def test_surviving_replicas_share_the_batch_out() -> None:
    request = two_kinds()
    plan = two_replicas(request)
    left = replace(request, cluster=part_of(request.cluster, ["slow"]))
    kept = survivors(left, plan)
    assert kept is not None
    assert [replica.num_microbatches for replica in kept.replicas] == [8]
    assert kept.replicas[0].stages == plan.replicas[1].stages
    nothing = replace(request, cluster=part_of(request.cluster, ["fast"]))
    assert survivors(nothing, replace(plan, replicas=plan.replicas[1:])) is None


def in_two_parts(request: PlanRequest) -> Plan:
    """Return a mixed replica and a slow replica, each in two parts per device."""
    fast, slow = Option(device_class=0), Option(device_class=1)
    plan = place(
        request,
        [
            UnplacedReplica(
                num_microbatches=num,
                microbatch_size=1,
                stages=((fast, (0, 2)), (slow, (2, 4))),
            )
            for num in (6, 2)
        ],
    )
    assert plan is not None
    cut = in_parts(plan, 2)
    assert cut is not None
    return replace(cut, schedule="interleaved")


@pytest.mark.parametrize("lost", [("fast", 1), ("slow", 1), ("slow", 2), ("fast", 2)])
def test_what_is_left_of_stages_that_share_devices_is_a_valid_plan(
    lost: tuple[str, int],
) -> None:
    request = two_kinds()
    plan, (name, num) = in_two_parts(request), lost
    nodes = tuple(
        replace(node, count=node.count - num) if node.name == name else node
        for node in request.cluster.nodes
    )
    cluster = replace(
        request.cluster, nodes=tuple(node for node in nodes if node.count)
    )
    request, model = replace(request, cluster=cluster), request.model
    kept, cut_anew = survivors(request, plan), repaired(request, plan)
    found = replan(request, plan)
    assert (kept is not None) == (num == 1)
    judged = [*map(PlanEvaluator(request), filter(None, [kept, cut_anew])), found.best]
    assert len(judged) > 1
    for predicted in judged:
        assert predicted is not None
        sizes = tensor_sizes(model)
        validate_plan(
            predicted.plan, cluster, len(model.layers), sizes, model.max_seq_len
        )
    if kept is not None:  # the kept replica continues unchanged, and nothing moves
        layers = [stage.layers for stage in kept.replicas[0].stages]
        assert layers == [stage.layers for stage in plan.replicas[0].stages]


def test_a_node_fetches_the_layers_that_it_did_not_hold_and_no_others() -> None:
    request = two_kinds()
    plan, model = two_replicas(request), request.model
    first, second = plan.replicas[0].stages
    # the slow node's replica holds all layers, so a stage moved there fetches nothing
    there = replace(second, node="slow", devices=(1,))
    moved = replace(plan.replicas[0], stages=(first, there))
    after = replace(plan, replicas=(moved, plan.replicas[1]))
    assert set(fetched_bytes(model, plan, after).values()) == {0.0}
    # without that replica, the slow node has to fetch the stage's layers
    before = replace(plan, replicas=plan.replicas[:1])
    fetched = fetched_bytes(model, before, replace(after, replicas=(moved,)))
    expected = 12 * sum(parameter_count(layer) for layer in model.layers[2:4])
    assert fetched == {"fast": 0.0, "slow": pytest.approx(expected)}
    after = replace(after, replicas=(moved,))
    found_s = fetching_s(model, request.cluster, before, after)
    assert found_s == pytest.approx(expected / (10e9 / 8))  # both cards: 10 Gbit/s


def test_state_comes_over_the_links_of_the_cluster_file() -> None:
    """Two nodes of one zone need a layer that only the other zone has: their bytes
    share the link between the zones."""
    request = two_kinds()
    fast, slow = request.cluster.nodes
    nodes = (
        replace(fast, zone="east"),
        replace(slow, zone="west"),
        replace(slow, name="third", zone="west"),
    )
    zones = Link(between=("east", "west"), bandwidth_gbit_per_s=0.1, latency_ms=1.0)
    cluster = Cluster(name="far", nodes=nodes, links=(zones,))
    plan, model = two_replicas(request), request.model
    only_fast = replace(plan, replicas=plan.replicas[:1])
    in_west = [
        replace(plan.replicas[0], stages=(replace(first, node=name, devices=(0,)),))
        for name in ("slow", "third")
        for first in plan.replicas[0].stages[:1]
    ]
    after = replace(plan, replicas=tuple(in_west))
    layers = range(*in_west[0].stages[0].layers)
    size = 12 * sum(parameter_count(model.layers[at]) for at in layers)
    found_s = fetching_s(model, cluster, only_fast, after)
    assert found_s == pytest.approx(2 * size / (0.1e9 / 8))
    # once one of the two has them, the other takes them from its neighbour
    with_slow = replace(plan, replicas=(*plan.replicas[:1], in_west[0]))
    near_s = fetching_s(model, cluster, with_slow, after)
    assert near_s == pytest.approx(size / (10e9 / 8))
    # what no node holds comes from a store, as fast as the card takes it
    lost = replace(cluster, nodes=nodes[1:], links=())
    assert fetching_s(model, lost, only_fast, after) == pytest.approx(near_s)


def test_near_horizons_keep_what_is_there_and_far_ones_move() -> None:
    request = two_kinds()
    plan = two_replicas(request)
    slow_start = replace(
        plan,
        replicas=(replace(plan.replicas[1], num_microbatches=8),),
    )
    # the network is slow: a move takes longer than the near horizon
    nodes = tuple(
        replace(node, network_gbit_per_s=0.01) for node in request.cluster.nodes
    )
    request = replace(request, cluster=replace(request.cluster, nodes=nodes))
    near = replan(request, slow_start, horizon_s=0.5)
    assert near.moved_bytes == 0
    kept = survivors(request, slow_start)
    assert kept is not None
    kept_s = evaluate_plan(request, kept).simulation.step_time_s
    assert near.best.simulation.step_time_s <= kept_s
    far = replan(request, slow_start, horizon_s=1e5)
    near_s = near.best.simulation.step_time_s
    assert far.best.simulation.step_time_s <= near_s


def test_stages_that_are_left_take_over_with_the_best_cuts() -> None:
    request = replace(two_kinds(), global_batch=32, microbatch_sizes=(1,))
    fast, slow = Option(device_class=0), Option(device_class=1)
    stages = ((fast, (0, 1)), (slow, (1, 2)), (slow, (2, 3)), (fast, (3, 4)))
    pipeline = UnplacedReplica(num_microbatches=32, microbatch_size=1, stages=stages)
    plan = place(request, [pipeline])
    assert plan is not None
    # the second device of the slow node is gone
    nodes = tuple(
        replace(node, count=1) if node.name == "slow" else node
        for node in request.cluster.nodes
    )
    left = replace(request, cluster=replace(request.cluster, nodes=nodes))
    cut_anew = repaired(left, plan)
    assert cut_anew is not None
    found = evaluate_plan(left, cut_anew)
    kept = [s for s in plan.replicas[0].stages if s.node == "fast" or s.devices == (0,)]
    (replica,) = found.plan.replicas
    assert [(s.node, s.devices) for s in replica.stages] == [
        (s.node, s.devices) for s in kept
    ]
    cuts = combinations(range(1, 4), 2)
    others = [
        evaluate_plan(
            left, with_cuts(found.plan, (0, *inner, 4))
        ).simulation.step_time_s
        for inner in cuts
    ]
    assert found.simulation.step_time_s == pytest.approx(min(others), rel=0.02)
    assert max(others) > min(others) * 1.1


def with_cuts(plan: Plan, cuts: tuple[int, ...]) -> Plan:
    (replica,) = plan.replicas
    stages = tuple(
        replace(stage, layers=(cuts[s], cuts[s + 1]))
        for s, stage in enumerate(replica.stages)
    )
    return replace(
        plan, schedule="1f1b", replicas=(replace(replica, stages=stages),), programs={}
    )


def test_a_plan_that_can_stay_is_left_only_for_a_better_one() -> None:
    request = two_kinds()
    found = find_plan(request).best
    again = replan(request, found.plan).best
    assert again.simulation.step_time_s <= found.simulation.step_time_s


def test_another_plan_keeps_the_schedule_that_it_was_found_with() -> None:
    """Its programs and launch-aheads, not another order under the same name."""
    request = two_kinds()
    search = Search(request, [Objective()])
    search.run(proves=False)
    (found,) = search.found()
    assert found.best.plan.programs
    slow = replace(two_replicas(request), replicas=two_replicas(request).replicas[1:])
    only = (replace(slow.replicas[0], num_microbatches=8),)
    current = replace(slow, replicas=only)
    moved = replan(request, current, horizon_s=1e9, others={"x": found.best.plan})
    assert moved.best.simulation.step_time_s <= found.best.simulation.step_time_s


def test_without_any_stage_left_the_plan_is_a_new_one() -> None:
    request = two_kinds()
    plan = two_replicas(request)
    only_slow = replace(plan, replicas=plan.replicas[1:])
    left = replace(request, cluster=part_of(request.cluster, ["fast"]))
    found = replan(left, only_slow)
    assert {stage.node for _, _, stage in found.best.plan.stages()} == {"fast"}


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_what_splits_backward_passes_may_go_on_to(schedule: str) -> None:
    request = two_kinds()
    plan = replace(two_replicas(request), schedule=schedule)
    left = replace(request, cluster=part_of(request.cluster, ["fast"]))
    kept = survivors(left, plan)
    assert kept is not None
    names = ["h1f1b", "zero-bubble"] if schedule == "zero-bubble" else ["h1f1b"]
    steps_s = [evaluate_plan(left, kept, name).simulation.step_time_s for name in names]
    found = replan(left, plan, horizon_s=1e6).best
    assert found.simulation.step_time_s <= min(steps_s) * (1 + 1e-9)
    assert schedule == "zero-bubble" or found.plan.schedule != "zero-bubble"


def test_the_simplest_plan_is_as_good_as_any_and_no_microbatches_could_be_larger() -> (
    None
):
    nodes = tuple(Node(name=name, device="cpu", count=1) for name in ("a", "b"))
    request = PlanRequest(
        model=load_named(TypedName("tiny")),
        cluster=slowness({"b": 1.9}, {}).applied(Cluster(name="two", nodes=nodes)),
        seq_len=128,
        global_batch=48,
    )
    stage = Stage(node="a", devices=(0,), layers=(0, 6), launch_ahead=1)
    halves = Plan(
        model="tiny",
        seq_len=128,
        global_batch=48,
        replicas=tuple(
            Replica(
                num_microbatches=6,
                microbatch_size=4,
                stages=(replace(stage, node=node.name),),
            )
            for node in nodes
        ),
    )
    fastest, found = (
        replan(request, halves, as_simple=simple).best for simple in (False, True)
    )
    best_s = fastest.simulation.step_time_s
    assert found.simulation.step_time_s <= 1.005 * best_s
    assert complexity(found.plan) < complexity(fastest.plan)
    # the slow replica has slack, whatever its microbatch size
    for n, replica in enumerate(found.plan.replicas):
        if replica.microbatch_size == max(request.microbatch_sizes):
            continue
        larger = replace(
            replica,
            num_microbatches=replica.num_microbatches // 2,
            microbatch_size=2 * replica.microbatch_size,
        )
        others = found.plan.replicas
        plan = replace(found.plan, replicas=(*others[:n], larger, *others[n + 1 :]))
        judged = evaluate_plan(request, plan)
        assert judged is None or judged.simulation.step_time_s > 1.005 * best_s


def test_a_large_cluster_also_tries_templates() -> None:
    """What survives fits, but leaves nearly all devices idle."""
    kinds = {"A100-SXM4-40GB": 9, "L4": 8}
    nodes = tuple(
        Node(name=f"{kind}-{n}", device=kind, count=8)
        for kind, num in kinds.items()
        for n in range(num)
    )
    request = PlanRequest(
        model=load_named(TypedName("tiny")),
        cluster=Cluster(name="large", nodes=nodes),
        seq_len=32,
        global_batch=1024,
    )
    assert request.is_large
    here = Stage(node=nodes[0].name, devices=(0,), layers=(0, 6), launch_ahead=1)
    alone = Replica(num_microbatches=256, microbatch_size=4, stages=(here,))
    current = Plan(model="tiny", seq_len=32, global_batch=1024, replicas=(alone,))
    found = replan(request, current).best.plan
    assert {node.device for node in nodes if node.name in found.nodes} == set(kinds)
    assert len(found.nodes) > len(nodes) / 2


def test_a_node_that_returns_gets_work_where_that_is_faster() -> None:
    """No template beats the two nodes that were left; a pipeline of b and c does."""
    devices = {"a": "A100-SXM4-40GB", "b": "L4", "c": "A10G"}
    nodes = tuple(Node(name=n, device=kind, count=1) for n, kind in devices.items())
    three = PlanRequest(
        model=load_named(TypedName("tiny")),
        cluster=Cluster(name="three", nodes=nodes),
        seq_len=32,
        global_batch=12,
    )
    two = replace(three, cluster=part_of(three.cluster, {"a", "c"}))
    left = replan(two, find_plan(two, local_work=0).best.plan).best
    back = replan(three, left.plan)
    assert back.best.plan.nodes == {"a", "b", "c"}
    assert back.source == "local search"
    assert back.best.simulation.step_time_s < 0.95 * left.simulation.step_time_s
