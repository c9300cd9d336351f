# SPDX-License-Identifier: Apache-2.0
"""No plan with split backward passes contradicts the bound for such plans.

Requests and plans are those of `test_bound_fuzz.py`. Each replica is checked against
its template, and each plan against the bound, under zero-bubble and under the runtime's
fastest schedule. Faults injected into the bound's costs must show.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.measured.layer_profile import Measurement, Profile
from hetjax.planner.bound import certificate
from hetjax.planner.bound.certificate import proved, space_of
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.problem import Problem
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.templates import column
from hetjax.planner.model.terms import split_terms
from hetjax.planner.model.terms.terms import bound_problem
from hetjax.planner.search.in_parts import in_parts
from hetjax.plans.plan import StageMesh
from hetjax.schedule.bound import ROUNDING
from tests.planner.bound_checks import alone_s, simulated, template_of
from tests.planner.near_plans import Proof, near_plan, proof_of, without_memory
from tests.planner.wide_space import (
    AMPLE_GIB,
    SEQ_LEN,
    Seat,
    model_of,
    plan_of,
    replica_of,
    wide_request,
)
from tests.short_runs import draws

NUM_PLANS = 20  # per request
SEEDS = (10, 11, 18, 32, 40, *range(10), *range(12, 18))
SCHEDULES = ("zero-bubble", "searched")
MEASURED = (10, 18, 32, 40)  # few devices: some plan is below a faulty bound


def with_halves(request: PlanRequest, seed: int) -> PlanRequest:
    """Return the request with measured halves of backward passes, if it has a profile.
    Some halves together take less than the whole pass; in some, nearly all time is the
    weights' half, where plans come near the bound. Some forwards are short."""
    profile, r = request.profile, Random(f"halves {seed}")
    if profile is None:
        return request
    measurements = []
    is_late = r.random() < 0.5
    for m in profile.measurements:
        share = 1e-3 if is_late else r.uniform(0.1, 0.9)
        halves_s = m.backward_s * r.uniform(0.8, 1.3)
        forward_s = m.forward_s * r.choice([1, 1, 1, 0.2, 0.01])
        measurements.append(
            replace(
                m,
                forward_s=forward_s,
                input_gradient_s=halves_s * share,
                weight_gradient_s=halves_s * (1 - share),
            )
        )
    measured: Profile = replace(profile, measurements=tuple(measurements))
    return replace(request, profile=measured)


def contradictions(seed: int, num_plans: int = NUM_PLANS) -> Iterator[str]:
    request = with_halves(wide_request(seed), seed)
    proof = proof_of(request)
    if proof.bound is None:
        return
    p, early_s, parts = split_terms.split_bound_problem(request, request.degrees)
    step_s = proved(request, space="split").step_s
    assert step_s is not None
    for n in range(num_plans):
        plan = near_plan(Random(f"{seed} {n}"), proof)
        for schedule in SCHEDULES:
            predicted = simulated(proof, plan, schedule)
            if predicted is None:
                continue
            assert space_of(request, predicted.plan) in ("whole", "split")
            found_s = predicted.simulation.step_time_s
            if found_s < step_s * (1 - ROUNDING):
                yield f"{seed}, {n}: {schedule} takes {found_s}, the bound is {step_s}"
            if predicted.plan.programs:
                continue
            for r, replica in enumerate(predicted.plan.replicas):
                template = template_of(replace(proof, problem=p), predicted.plan, r)
                c = column(p, template, "prefix")
                time_s = c.time_s(parts * replica.num_microbatches) - c.after_s
                if alone_s(predicted, r) < (time_s - early_s) * (1 - ROUNDING):
                    yield f"{seed}, {n}: replica {r} is faster than its template"


def contradictions_in_parts(seed: int, num_plans: int = NUM_PLANS) -> Iterator[str]:
    request = with_halves(wide_request(seed), seed)
    proof = proof_of(request)
    if proof.bound is None:
        return
    step_s = proved(request, space="interleaved").step_s
    assert step_s is not None
    for n in range(num_plans):
        plan = near_plan(Random(f"{seed} {n}"), proof)
        for num_parts in (2, 3, 4):
            cut = in_parts(plan, num_parts)
            predicted = cut and simulated(proof, cut, "searched")
            if not predicted:
                continue
            assert space_of(request, predicted.plan) == "interleaved"
            found_s = predicted.simulation.step_time_s
            if found_s < step_s * (1 - ROUNDING):
                yield f"{seed}, {n}: takes {found_s}, the bound is {step_s}"


@pytest.mark.parametrize("seed", draws(SEEDS, short=3))
def test_no_plan_in_parts_contradicts_the_bound_of_shared_devices(seed: int) -> None:
    assert not list(contradictions_in_parts(seed))


@pytest.mark.parametrize("seed", draws(SEEDS, short=3))
def test_no_plan_contradicts_the_bound_of_split_backward_passes(seed: int) -> None:
    assert not list(contradictions(seed))


def test_split_backward_passes_beat_the_bound_of_whole_ones() -> None:
    """So the bound for whole passes does not hold for split ones."""

    def of_whole_ones(*given) -> tuple[Problem, float, int]:
        return bound_problem(*given), 0.0, 1

    assert found_with(of_whole_ones)


def test_what_layers_of_little_forward_lack_is_taken_off() -> None:
    """Without this correction the bound would exceed a valid step: that of an embedding
    with hardly any forward and a next stage whose time is mostly weight gradients."""
    request = slow_weights()
    seats = [Seat(node=n, devices=(0,), mesh=StageMesh(), remat="none") for n in "ab"]
    plan = plan_of(request, [replica_of(1, 1, seats, [(0, 1), (1, 3)])])
    with without_memory():
        found = evaluate_plan(request, plan, "zero-bubble")
    p, early_s, _ = split_terms.split_bound_problem(request, request.degrees)
    proof = Proof(request=request, problem=p, bound=None)
    time_s = column(p, template_of(proof, found.plan, 0), "prefix").time_s(
        p.global_batch
    )
    assert time_s - early_s <= found.simulation.step_time_s < time_s


def slow_weights() -> PlanRequest:
    """Return a request of three layers on two devices with nearly free messages."""
    seconds = {"embedding": (1e-6, 1e-6, 0.6), "block": (0.2, 1e-6, 0.3)}
    seconds["head"] = (0.15, 1e-6, 0.35)
    measurements = tuple(
        Measurement(
            device="made-up",
            kind=kind,
            tensor=1,
            microbatch_size=1,
            remat="none",
            forward_s=forward_s,
            backward_s=input_s + weight_s,
            input_gradient_s=input_s,
            weight_gradient_s=weight_s,
            update_s=0.0,
        )
        for kind, (forward_s, input_s, weight_s) in seconds.items()
    )
    node = Node(
        name="a",
        device="made-up",
        count=1,
        peak_tflops=1.0,
        memory_gib=AMPLE_GIB,
        memory_gb_per_s=10.0,
        intra_node_gb_per_s=10.0,
        network_gbit_per_s=1000.0,
    )
    return PlanRequest(
        model=model_of(3),
        cluster=Cluster(name="two", nodes=(node, replace(node, name="b"))),
        seq_len=SEQ_LEN,
        global_batch=1,
        dtype="float32",
        profile=Profile(
            model=model_of(3).name,
            seq_len=SEQ_LEN,
            dtype="float32",
            layers=tuple(seconds),
            measurements=measurements,
        ),
        microbatch_sizes=(1,),
        tensor_degrees=(1,),
        data_degrees=(1,),
        remats=("none",),
    )


def found_with(fault: Callable[..., tuple[Problem, float, int]]) -> bool:
    """Return whether some plan contradicts a bound with these costs."""
    places = split_terms, certificate
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(patch.object(place, "split_bound_problem", fault))
        return any(next(contradictions(seed), None) for seed in MEASURED)
