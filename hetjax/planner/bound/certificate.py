# SPDX-License-Identifier: Apache-2.0
"""Certifies a search: no plan of the request's space simulates faster than the bound.

Owns the definition of the space, the comparison of the bound with every plan that the
search simulated, and the error if a plan contradicts the bound. Does not own how bounds
are proved (`column_generation.py`), nor whether a plan is valid
(`plans/validation.py`) and fits into memory (`model/evaluator.py`).
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Literal, get_args

from hetjax.errors import NoFeasiblePlan
from hetjax.planner.bound.busy_bound import busy_bound_s
from hetjax.planner.bound.column_generation import lower_bound
from hetjax.planner.bound.cut_bound import bound_by_cuts, bound_within
from hetjax.planner.model.deadline import TimeUp
from hetjax.planner.model.problem import Problem
from hetjax.planner.model.request import PlanRequest, may_offload
from hetjax.planner.model.terms.split_terms import split_bound_problem
from hetjax.planner.model.terms.terms import bound_problem
from hetjax.plans.plan import Plan
from hetjax.plans.schedules import SCHEDULES
from hetjax.schedule.bound import LowerBound
from hetjax.schedule.predicted import Predicted
from hetjax.schedule.programs.action import Op, parse_program
from hetjax.schedule.simulation.result import shares_devices

# whole: backward passes are whole; split: they may be split; interleaved: stages may
# also share devices. Each space contains those before it.
Space = Literal["whole", "split", "interleaved"]
_SPACES: tuple[Space, ...] = get_args(Space)

_WHAT = "a plan found by the search"


def space_of(request: PlanRequest, plan: Plan) -> Space | None:
    """Return the smallest space that contains a valid plan; None if the bounds of this
    request do not cover the plan.

    A plan of a space computes the request's batch, in any order. It uses the choices
    that the request leaves open: tensor and data degrees, remats, offloads and
    microbatch sizes. Stages and replicas may differ in all of these, and lie on any
    devices of a node in any order. Precision and attention form are the request's.
    """
    if not _is_open(request, plan):
        return None
    if shares_devices(plan):
        return "interleaved"
    return "split" if _is_split(plan) else "whole"


def _is_split(plan: Plan) -> bool:
    """Return whether some backward pass may be in two halves."""
    if not plan.programs:
        return SCHEDULES[plan.schedule].splits
    programs = map(parse_program, plan.programs.values())
    return any(action.op is Op.I for program in programs for action in program)


def _is_open(request: PlanRequest, plan: Plan) -> bool:
    """Return whether the request leaves the plan's choices open."""
    return (
        plan.seq_len == request.seq_len
        and plan.global_batch == request.global_batch
        and all(r.microbatch_size in request.microbatch_sizes for r in plan.replicas)
        and all(
            stage.remat in request.remats
            and stage.offload in request.offloads
            and may_offload(stage.offload, request.cluster.node(stage.node))
            and stage.mesh.tensor in request.degrees
            and stage.mesh.data in request.data_degrees
            and stage.precision in (None, request.precisions[stage.node])
            and stage.attention in (None, request.attentions[stage.node])
            for _, _, stage in plan.stages()
        )
    )


def certified_bound(
    request: PlanRequest, simulated: Iterable[Predicted], space: Space = "whole"
) -> LowerBound:
    """Return the lower bound on the simulated step of all plans of the space.

    It covers stages of all tensor degrees (`Found` in `search/find.py`). When the time
    is up (`model/deadline.py`), it is what was proven until then.
    """
    least_s = _least_s(request, simulated, space)
    try:
        found = proved(request, 0.0 if math.isinf(least_s) else least_s, space)
    except NoFeasiblePlan as error:
        return _none_exists(error, is_false=math.isfinite(least_s))
    except TimeUp:
        return LowerBound(why="the search stopped before it proved one")
    return found.held_against(least_s, _WHAT)


def held(
    bound: LowerBound,
    request: PlanRequest,
    simulated: Iterable[Predicted],
    space: Space = "whole",
) -> LowerBound:
    """Return the bound, compared with plans simulated since it was proved."""
    return bound.held_against(_least_s(request, simulated, space), _WHAT)


def _least_s(
    request: PlanRequest, simulated: Iterable[Predicted], space: Space
) -> float:
    """Return the least simulated step of plans in the space; inf if there are none."""
    spaces = _SPACES[: _SPACES.index(space) + 1]
    inside = (found for found in simulated if space_of(request, found.plan) in spaces)
    return min((found.simulation.step_time_s for found in inside), default=math.inf)


def proved(
    request: PlanRequest, longest_s: float = 0.0, space: Space = "whole"
) -> LowerBound:
    """Return the bound, not compared with any plan. For the interleaved space it
    assumes devices that compute all the time.

    Raises NoFeasiblePlan if no plan fits into memory, or if none computes the batch in
    any sensible time, or in `longest_s` if that is longer.
    """
    if space != "whole":
        p, early_s, parts = split_bound_problem(request, request.degrees)
        busy_s = _busy_s(request, p, parts)
        if space == "interleaved":
            return LowerBound(step_s=busy_s)
        found_s = _least_step_s(request, p, busy_s, longest_s + early_s, parts)
        return LowerBound(step_s=max(found_s - early_s, busy_s))
    found: list[float] = []
    problems: list[NoFeasiblePlan] = []
    for num_replicas in ("several", "one"):
        p = bound_problem(request, request.degrees, num_replicas=num_replicas)
        try:
            least_s = min(found, default=math.inf)  # the lesser of the two counts
            busy_s = _busy_s(request, p)
            found.append(_least_step_s(request, p, busy_s, longest_s, enough_s=least_s))
        except NoFeasiblePlan as problem:
            problems.append(problem)
    if not found:
        raise problems[0]
    return LowerBound(step_s=min(found))


def _least_step_s(
    request: PlanRequest,
    p: Problem,
    busy_s: float,
    longest_s: float,
    parts: int = 1,
    enough_s: float = math.inf,
) -> float:
    bound = lower_bound(
        p, "prefix", quick=request.is_large, longest_s=longest_s, enough_s=enough_s
    )
    best_s = max(bound.step_s, busy_s)
    within = partial(bound_within, bound)
    return bound_by_cuts(request, p, best_s, within, parts=parts, enough_s=enough_s)


def _busy_s(request: PlanRequest, p: Problem, parts: int = 1) -> float:
    """Return the bound of devices that never wait, whatever the pipelines."""
    return bound_by_cuts(request, p, busy_bound_s(p), busy_bound_s, parts=parts)


def _none_exists(error: NoFeasiblePlan, *, is_false: bool) -> LowerBound:
    """Return the bound of a space proved empty; if `is_false`, a plan contradicts."""
    if not is_false:
        return LowerBound(why=f"no plan of these choices exists: {error.got}")
    why = (
        f"internal error: the bound proves that no plan exists ({error.got}), but one "
        "does: please report it with model, cluster and options"
    )
    return LowerBound(why=why, is_false=True)
