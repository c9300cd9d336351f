# SPDX-License-Identifier: Apache-2.0
"""A new plan for a changed cluster, counting what has to move.

Owns the bytes that a new plan asks nodes to fetch, and the trade between a faster step
and a longer move. Does not own the search (`find.py`) nor the move itself.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from hetjax.cluster.catalogue import device_spec
from hetjax.models.model import Model, parameter_count
from hetjax.planner.model.deadline import TimeUp, check_deadline
from hetjax.planner.model.evaluator import PlanEvaluator
from hetjax.planner.model.objectives import Objective, score, within
from hetjax.planner.model.request import Request
from hetjax.planner.search.find import find_plan
from hetjax.planner.search.proposals import plans_by_rank, proposals
from hetjax.planner.search.repair import handed_out, repaired, stages_there
from hetjax.plans.plan import Plan
from hetjax.schedule.predicted import Predicted

_TIME = Objective()
_NO_PLANS: Mapping[str, Plan] = {}
_STATE_BYTES = 12  # of a parameter: master weight and two moments, in fp32


@dataclass(frozen=True, kw_only=True)
class Replanned:
    """The plan to go on with; `move_s` is until its state is where it belongs."""

    best: Predicted
    source: str
    moved_bytes: float
    move_s: float
    search_s: float


def replan(
    request: Request,
    current: Plan,
    horizon_s: float = 3600.0,
    objective: Objective = _TIME,
    *,
    others: Mapping[str, Plan] = _NO_PLANS,
    at_once: bool = False,
) -> Replanned:
    """Return the plan that does best by the objective until the horizon, the move
    included.

    `request.cluster` is what is there now. Time matters more than the last percent:
    tensor degrees stay, and only where that gives nothing all is searched. `others` are
    plans from elsewhere to choose from too, by name. `at_once`: only what is left of
    the current plan is tried, as long as that gives a plan. NoFeasiblePlan if nothing
    fits.
    """
    begin_s = time.monotonic()
    evaluate = PlanEvaluator(request)
    choices: list[tuple[str, Predicted]] = []
    with suppress(TimeUp):
        for find in (_left, _templates, lambda *_: others.items()):
            if choices and at_once:
                break
            for source, plan in find(request, current):
                judged = evaluate(plan)
                if judged is not None and within(judged, objective):
                    choices.append((source, judged))
                if choices:
                    check_deadline()
    if not choices:
        found = find_plan(request, objective, local_search_s=0.0)
        choices.append((found.source, found.best))
    moves = [_move(request, current, predicted.plan) for _, predicted in choices]

    def gain(n: int) -> float:
        left_s = max(horizon_s - moves[n][1], 0.0)
        return left_s / score(choices[n][1], request.cluster, objective)

    n = max(range(len(choices)), key=gain)
    return Replanned(
        best=choices[n][1],
        source=choices[n][0],
        moved_bytes=moves[n][0],
        move_s=moves[n][1],
        search_s=time.monotonic() - begin_s,
    )


def _left(request: Request, current: Plan) -> Iterator[tuple[str, Plan]]:
    """What is left of the current plan."""
    kept = survivors(request, current)
    if kept is not None:
        yield "the surviving replicas", kept
    cut_anew = repaired(request, current)
    if cut_anew is not None:
        yield "the surviving stages", cut_anew


def _templates(request: Request, current: Plan) -> Iterator[tuple[str, Plan]]:
    """What the model proposes at the degrees that are in use."""
    in_use = {stage.mesh.tensor for _, _, stage in current.stages()}
    degrees = tuple(sorted(in_use & set(request.degrees))) or request.degrees
    same = replace(request, tensor_degrees=degrees)
    for plan in plans_by_rank(list(proposals(same, whole=True))):
        yield "templates", plan


def survivors(request: Request, current: Plan) -> Plan | None:
    """Return the plan of the replicas that lost no device; None if that does not do.

    They share the global batch out as they did: who did more does more.
    """
    whole = [
        replica
        for replica in current.replicas
        if stages_there(request, replica) == replica.stages
    ]
    left = request.global_batch - sum(
        r.num_microbatches * r.microbatch_size for r in whole
    )
    counts = handed_out(
        [r.num_microbatches for r in whole],
        [r.microbatch_size for r in whole],
        left,
        lambda n, count: count / whole[n].num_microbatches,
    )
    if not counts or left < 0:
        return None
    replicas = tuple(
        replace(replica, num_microbatches=count)
        for replica, count in zip(whole, counts, strict=True)
    )
    return replace(
        current,
        global_batch=request.global_batch,
        schedule="1f1b",
        replicas=replicas,
        programs={},
        predicted=None,
    )


def fetched_bytes(model: Model, current: Plan, plan: Plan) -> dict[str, float]:
    """Return the bytes of state that every node of the new plan has to fetch.

    A node that holds a layer now holds all of it; what it lacks it fetches once.
    """
    before, after = _held(current), _held(plan)
    return {
        node: float(
            sum(
                _STATE_BYTES * parameter_count(model.layers[layer])
                for layer in layers - before.get(node, set())
            )
        )
        for node, layers in after.items()
    }


def _held(plan: Plan) -> dict[str, set[int]]:
    held: dict[str, set[int]] = {}
    for _, _, stage in plan.stages():
        held.setdefault(stage.node, set()).update(range(*stage.layers))
    return held


def _move(request: Request, current: Plan, plan: Plan) -> tuple[float, float]:
    """Bytes in all, and seconds until the node that lacks most has them."""
    by_node = fetched_bytes(request.model, current, plan)
    nodes = {node.name: node for node in request.cluster.nodes}
    seconds = [
        size / (device_spec(nodes[name]).network_gbit_per_s * 1e9 / 8)
        for name, size in by_node.items()
    ]
    return sum(by_node.values()), max(seconds, default=0.0)
