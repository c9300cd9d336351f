# SPDX-License-Identifier: Apache-2.0
"""The certified bound: plans that past bounds exceeded, and reports of false bounds."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.measured.layer_profile import LinkMeasurement, Measurement, Profile
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.bound import pricing
from hetjax.planner.bound.certificate import proved, space_of
from hetjax.planner.bound.pricing import PricingResult
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.objectives import Objective
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import Found, Search
from hetjax.plans.plan import LayerRange, Plan, Replica, Stage, StageMesh
from hetjax.report.prediction import bound_line, certificate, found_plan
from hetjax.schedule.bound import ROUNDING, LowerBound
from tests.planner.bound_mutants import FAULTS
from tests.planner.whole_space import fastest_s, random_request, small_model
from tests.short_runs import draws

Case = tuple[PlanRequest, Plan]
DEVICE = Node(
    name="n0",
    device="made-up",
    count=1,
    peak_tflops=0.1,
    memory_gib=1.0,
    memory_gb_per_s=50.0,
    intra_node_gb_per_s=5.0,
    network_gbit_per_s=10.0,
)


def request_on(cluster: Cluster, blocks: int, batch: int, **changes) -> PlanRequest:
    request = PlanRequest(
        model=small_model(blocks),
        cluster=cluster,
        seq_len=64,
        global_batch=batch,
        dtype="float32",
        microbatch_sizes=(1, 2, 4),
        tensor_degrees=(1, 2),
        data_degrees=(1, 2, 4),
        remats=("none",),
    )
    return replace(request, **changes)


def pipeline(
    request: PlanRequest,
    size: int,
    *stages: tuple[str, tuple[int, ...], StageMesh, LayerRange],
) -> Plan:
    return Plan(
        model=request.model.name,
        seq_len=request.seq_len,
        global_batch=request.global_batch,
        replicas=(
            Replica(
                num_microbatches=request.global_batch // size,
                microbatch_size=size,
                stages=tuple(
                    Stage(
                        node=node,
                        devices=devices,
                        mesh=mesh,
                        layers=layers,
                        launch_ahead=len(stages) - s,
                    )
                    for s, (node, devices, mesh, layers) in enumerate(stages)
                ),
            ),
        ),
    )


@pytest.mark.parametrize("seed", draws([18, 54, 100, 102, 125], short=2))
def test_the_fastest_of_all_plans_is_above_the_bound_by_less_than_a_twentieth(
    seed: int,
) -> None:
    """So this test would detect a bound that is a twentieth too high."""
    request = random_request(seed)
    bound_s, optimum_s = proved(request).step_s, fastest_s(request)
    assert bound_s is not None
    assert bound_s <= optimum_s * (1 + ROUNDING) < 1.05 * bound_s


def test_known_columns_that_come_again_prove_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A column that contradicts prices refutes a proof, even if it was known."""
    request, priced = random_request(2), list[PricingResult]()

    def forgetful(*arguments: Any, **options: Any) -> PricingResult:
        if not priced or not priced[0].columns:
            priced[:] = [pricing.solve_pricing(*arguments, **options)]
        return replace(priced[0], is_complete=True)

    monkeypatch.setattr(
        "hetjax.planner.bound.column_generation.solve_pricing", forgetful
    )
    bound_s = proved(request).step_s
    assert bound_s is not None and priced[0].columns
    assert bound_s <= fastest_s(request) * (1 + ROUNDING)


def searched(request: PlanRequest) -> Found:
    search = Search(request, [Objective()], local_work=0)
    search.run()
    return search.found()[0]


def one_measurement(blocks: int, seconds: float) -> Profile:
    model = small_model(blocks)
    kinds = ("embedding", *("block",) * blocks, "head")
    return Profile(
        model=model.name,
        seq_len=64,
        dtype="float32",
        layers=kinds,
        measurements=tuple(
            Measurement(
                device="made-up",
                kind=kind,
                tensor=1,
                microbatch_size=size,
                forward_s=seconds * size,
                backward_s=2 * seconds * size,
                update_s=0.0,
            )
            for kind in dict.fromkeys(kinds)
            for size in (1, 2, 4)
        ),
    )


def unlike_links() -> Case:
    """Return four equal nodes; the link of the first two was measured and is slow."""
    nodes = tuple(replace(DEVICE, name=f"n{n}", memory_gib=0.00234) for n in range(4))
    slow = LinkMeasurement(
        between=("n0", "n1"), bandwidth_gbit_per_s=0.001, latency_ms=20.0
    )
    request = request_on(
        Cluster(name="four", nodes=nodes),
        2,
        4,
        profile=replace(one_measurement(2, 1e-4), links=(slow,)),
        microbatch_sizes=(1,),
        tensor_degrees=(1,),
        data_degrees=(1,),
    )
    mesh = StageMesh()
    stages = ("n2", (0,), mesh, (0, 2)), ("n3", (0,), mesh, (2, 4))
    return request, pipeline(request, 1, *stages)


def stages_over_hosts() -> Case:
    """Return a case of two stages, each on both hosts, with messages inside hosts."""
    node = replace(DEVICE, count=8, hosts=2, network_gbit_per_s=0.01, memory_gib=0.002)
    request = request_on(
        Cluster(name="hosts", nodes=(node,)),
        2,
        64,
        microbatch_sizes=(4,),
        tensor_degrees=(1,),
        data_degrees=(4,),
    )
    mesh = StageMesh(data=4)
    stages = ("n0", (0, 4, 1, 5), mesh, (0, 2)), ("n0", (2, 6, 3, 7), mesh, (2, 4))
    return request, pipeline(request, 4, *stages)


def tensor_groups_over_hosts() -> Case:
    """Return a case of 3 devices per host: pairs of the first four would cross."""
    node = replace(DEVICE, count=6, hosts=2, network_gbit_per_s=0.05)
    request = request_on(
        Cluster(name="hosts", nodes=(node,)),
        2,
        64,
        microbatch_sizes=(4,),
        tensor_degrees=(2,),
        data_degrees=(2,),
    )
    mesh = StageMesh(data=2, tensor=2)
    return request, pipeline(request, 4, ("n0", (0, 1, 3, 4), mesh, (0, 4)))


def as_deep_as_the_model() -> Case:
    """Return a case of 20 layers, mostly weights, on devices that hold one each."""
    nodes = tuple(replace(DEVICE, name=f"n{n}", memory_gib=0.0011) for n in range(20))
    request = request_on(
        Cluster(name="deep", nodes=nodes),
        18,
        2,
        seq_len=8,
        microbatch_sizes=(1,),
        tensor_degrees=(1,),
        data_degrees=(1,),
    )
    stages = [(f"n{s}", (0,), StageMesh(), (s, s + 1)) for s in range(20)]
    return request, pipeline(request, 1, *stages)


def better_at_some_layers() -> Case:
    """Return a case of two devices, each ten times faster on half of the model."""
    nodes = tuple(replace(DEVICE, name=f"n{n}", device=f"made-up-{n}") for n in (0, 1))
    even = one_measurement(2, 1e-2)
    kinds = ("embedding", "other", "block", "head")
    measurements = tuple(
        replace(m, device=f"made-up-{n}", kind=kind, forward_s=s, backward_s=s)
        for m in even.measurements
        if m.kind == "block"
        for n in (0, 1)
        for at, kind in enumerate(kinds)
        for s in [m.forward_s * (1 if n == at // 2 else 10)]
    )
    request = request_on(
        Cluster(name="halves", nodes=nodes),
        2,
        64,
        profile=replace(even, layers=kinds, measurements=measurements),
        microbatch_sizes=(1,),
        tensor_degrees=(1,),
        data_degrees=(1,),
    )
    mesh = StageMesh()
    stages = ("n0", (0,), mesh, (0, 2)), ("n1", (0,), mesh, (2, 4))
    return request, pipeline(request, 1, *stages)


CASES: Mapping[str, Callable[[], Case]] = {
    "links": unlike_links,
    "messages over hosts": stages_over_hosts,
    "tensor groups over hosts": tensor_groups_over_hosts,
    "depth": as_deep_as_the_model,
    "shares of a model": better_at_some_layers,
}


def is_above_bound(case: Case) -> bool:
    """Return whether the plan takes at least the bound and is not called infeasible."""
    request, plan = case
    assert space_of(request, plan) == "whole"
    step_time_s = evaluate_plan(request, plan).simulation.step_time_s
    try:
        bound_s = proved(request, step_time_s).step_s
    except NoFeasiblePlan:
        return False
    assert bound_s is not None and bound_s > 0
    return step_time_s >= bound_s * (1 - ROUNDING)


@pytest.mark.parametrize("name", CASES)
def test_plans_that_bounds_were_once_above_are_above_the_bound(name: str) -> None:
    assert is_above_bound(CASES[name]())


@pytest.mark.parametrize("name", CASES)
def test_faults_that_bounds_once_had_would_be_found(name: str) -> None:
    with FAULTS[name]():
        assert not is_above_bound(CASES[name]())


def test_a_search_certifies_pipelines_that_are_as_deep_as_the_model() -> None:
    request, plan = as_deep_as_the_model()
    search = Search(request, [Objective()], local_work=0)
    search.incumbents.offer(plan, "given")
    search.run()
    (found,) = search.found()
    assert found.lower_bound_s is not None and found.gap is not None
    assert len(found.best.plan.replicas[0].stages) > 16
    step_time_s = found.best.simulation.step_time_s
    assert found.gap == pytest.approx(step_time_s / found.lower_bound_s - 1)


def test_a_search_that_finds_a_plan_below_its_bound_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = request_on(Cluster(name="one", nodes=(DEVICE,)), 1, 2)
    request = replace(request, tensor_degrees=(1,), data_degrees=(1,))
    found = searched(request)
    assert found.gap is not None and found.gap >= 0 and not found.bound.is_false
    monkeypatch.setattr(
        "hetjax.planner.bound.certificate.proved",
        lambda request, longest_s, space: LowerBound(step_s=10.0),
    )
    found = searched(request)
    assert found.bound.is_false
    assert found.lower_bound_s is found.gap is None
    assert "internal error" in bound_line(found)
    assert "internal error" in certificate(found)
    predicted = found_plan(found).predicted
    assert predicted is not None and predicted.lower_bound_s is predicted.gap is None


def test_a_plan_below_the_bound_is_an_error_and_no_certificate() -> None:
    bound = LowerBound(step_s=2.0)
    assert bound.held_against(2.0 * (1 - 1e-10), "a plan") == bound
    assert bound.gap(2.0 * (1 - 1e-10)) == 0.0
    assert bound.gap(1.0) == -0.5  # nothing is clamped
    told = bound.held_against(1.9, "a plan")
    assert told.is_false and told.step_s is None and told.gap(1.9) is None
    assert "internal error" in told.why
