# SPDX-License-Identifier: Apache-2.0
"""What must hold between a plan of the space and the planner's proof.

Owns the checks. The last checks what users are told; the others check each part of the
proof against the same plan, so that a fault shows even for a plan far from the bound.
Does not own the plans (`near_plans.py`).
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import numpy as np

from hetjax.costs.costs import Costs
from hetjax.errors import NoFeasiblePlan
from hetjax.models.model import tensor_sizes
from hetjax.planner.bound.certificate import space_of
from hetjax.planner.bound.restricted_master import most_sequences
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.templates import Template, TemplateStage, column, stacked
from hetjax.planner.model.terms.terms import bound_problem
from hetjax.plans.plan import Plan
from hetjax.plans.validation import validate_plan
from hetjax.schedule.bound import ROUNDING
from hetjax.schedule.predicted import Predicted
from hetjax.schedule.programs.lower import lower
from hetjax.schedule.simulation.simulator import simulate
from tests.planner.near_plans import Proof, without_memory


def simulated(proof: Proof, plan: Plan, schedule: str = "h1f1b") -> Predicted | None:
    """Return the plan as the search evaluates it; None if it exceeds memory."""
    with nullcontext() if proof.tight else without_memory():
        try:
            return evaluate_plan(proof.request, plan, schedule, climbs=False)
        except NoFeasiblePlan:
            return None


def contradictions(proof: Proof, predicted: Predicted) -> Iterator[str]:
    """Yield each claim of the proof that a simulated plan contradicts."""
    request, plan = proof.request, predicted.plan
    model = request.model
    validate_plan(
        plan,
        request.cluster,
        len(model.layers),
        tensor_sizes(model),
        model.max_seq_len,
    )
    assert space_of(request, plan) == "whole"
    if proof.bound is None:
        yield "there is a plan"
        return
    yield from _of_templates(proof, predicted)
    yield from _of_replicas(proof, predicted)
    step_time_s = predicted.simulation.step_time_s
    if step_time_s < proof.bound.step_s * (1 - ROUNDING):
        yield f"step {step_time_s} s below the bound {proof.bound.step_s} s"


def _of_templates(proof: Proof, predicted: Predicted) -> Iterator[str]:
    """Check that each replica's template exists, takes no longer and does no more than
    the prices say, and that all fit on the devices."""
    p, bound = proof.problem, proof.bound
    assert bound is not None
    taken_R = np.zeros(len(p.room_R))
    for r, replica in enumerate(predicted.plan.replicas):
        c = column(p, template_of(proof, predicted.plan, r), "prefix")
        if c.memory_microbatches < replica.num_microbatches:
            yield f"replica {r} fits into memory"
        time_s = c.time_s(replica.num_microbatches) - c.after_s
        found_s = alone_s(predicted, r)
        if found_s < time_s * (1 - ROUNDING):
            yield f"replica {r} takes {found_s} s alone, its template {time_s} s"
        taken_R += c.taken
        sequences = float(most_sequences(p, stacked([c]), bound.step_s)[0])
        price = float(np.array(c.taken) @ bound.duals_R)
        most = p.global_batch * price / float(bound.duals_R @ p.room_R)
        if sequences > most * (1 + 1e-6):
            yield f"replica {r} does {sequences} for the price of {most}"
    if (taken_R > p.room_R).any():
        yield f"takes {taken_R} of {p.room_R}"


def _of_replicas(proof: Proof, predicted: Predicted) -> Iterator[str]:
    """Check that the step includes each replica's gradient sums, if there are several
    replicas, and its updates."""
    request, plan = proof.request, predicted.plan
    num_replicas = "several" if len(plan.replicas) > 1 else "one"
    p = bound_problem(request, request.degrees, num_replicas=num_replicas)
    for r, replica in enumerate(plan.replicas):
        template = template_of(replace(proof, problem=p), plan, r)
        time_s = column(p, template, "prefix").time_s(replica.num_microbatches)
        if predicted.simulation.step_time_s < time_s * (1 - ROUNDING):
            yield f"replica {r} of {num_replicas} takes {time_s} s by its template"


def template_of(proof: Proof, plan: Plan, r: int) -> Template:
    """Return the replica as a template, without its devices."""
    p, request, replica = proof.problem, proof.request, plan.replicas[r]
    class_of = {
        node.name: c for c, own in enumerate(request.classes) for node in own.nodes
    }
    options = {
        (o.device_class, o.tensor, o.data, o.remat, o.offload): n
        for n, o in enumerate(p.options)
    }
    return Template(
        microbatch_size=replica.microbatch_size,
        stages=tuple(
            TemplateStage(
                option=options[
                    class_of[s.node], s.mesh.tensor, s.mesh.data, s.remat, s.offload
                ],
                layers=s.layers,
            )
            for s in replica.stages
        ),
    )


def alone_s(predicted: Predicted, r: int) -> float:
    """Return the time of a replica with all trunks to itself, no sums, no updates."""
    plan, costs = predicted.plan, predicted.costs
    keys = [(r, s) for s in range(len(plan.replicas[r].stages))]
    edges = [(a, b) for a in keys for b in keys if abs(a[1] - b[1]) == 1]
    alone = replace(plan, replicas=plan.replicas[r : r + 1])
    of_one = Costs(
        times={(0, s): replace(costs.times[r, s], update_s=0.0) for r, s in keys},
        trunks=costs.trunks,
        routes={((0, a[1]), (0, b[1])): costs.routes[a, b] for a, b in edges},
        message_bytes={
            ((0, a[1]), (0, b[1])): costs.message_bytes[a, b] for a, b in edges
        },
    )
    return simulate(lower(alone), alone, of_one).step_time_s
