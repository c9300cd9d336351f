# SPDX-License-Identifier: Apache-2.0
"""Reports the nearest plan if no plan keeps to a request's limits of cost and time.

Owns the objective of the search in this case, and the error text: by how much the
nearest plan misses the limits, and whether any plan could keep to them. Does not own
the limits (`model/objectives.py`) nor the search (`find.py`).
"""

import math
from collections.abc import Iterable, Sequence

from hetjax.cluster.prices import device_price_per_hour
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.bound.certificate import Space
from hetjax.planner.model.deadline import is_over
from hetjax.planner.model.objectives import Objective
from hetjax.planner.model.request import PlanRequest
from hetjax.schedule.bound import LowerBound
from hetjax.schedule.predicted import Predicted

_DIGITS = 4  # significant digits of an advised limit
_NOT_KNOWN = "a limit that some plan meets: it is not known whether any meets this one"
_OF: dict[Space, str] = {  # text that is not empty ends in a space
    "whole": "with whole backward passes ",
    "split": "without interleaved stages ",
    "interleaved": "",
}


def limits_of(objective: Objective) -> list[str]:
    """Return the limits of cost and time as text; empty if there are none."""
    found, least = [], objective.min_tokens_per_s
    if objective.max_usd_per_hour is not None:
        found.append(f"{objective.max_usd_per_hour:g} USD per hour")
    if least is not None and objective.tokens is not None:
        tokens = f"{objective.tokens / 1e9:,.6g} billion tokens"
        found.append(f"{_speed(objective, least)} for {tokens}")
    elif least is not None:
        found.append(f"at least {_speed(objective, least)}")
    return found


def as_fast_as_can_be(objective: Objective) -> Objective:
    """Return the objective of the fastest plan that costs no more per hour. If the wish
    is cost, plans still need a price."""
    most = objective.max_usd_per_hour
    if most is None and objective.wish == "cost":
        most = math.inf
    return Objective(max_usd_per_hour=most)


def too_slow(
    request: PlanRequest,
    objective: Objective,
    fastest: Predicted,
    bound: LowerBound,
    space: Space,
) -> NoFeasiblePlan:
    """Return the error for a limit of time that the fastest plan found misses; `bound`
    is that of the `space`."""
    does, least = fastest.tokens_per_s, objective.min_tokens_per_s
    assert least is not None
    most = math.inf
    if bound.step_s:
        most = request.global_batch * request.seq_len / bound.step_s
    allowed, is_ruled_out = _NOT_KNOWN, most < least
    if is_ruled_out:
        allowed = f"{_speed(objective, most)} at best: no plan {_OF[space]}is faster"
    elif most < math.inf:
        allowed += f"; none {_OF[space]}is faster than {_speed(objective, most)}"
    fix = _fast_enough(objective, fastest)
    if is_over() and not is_ruled_out:
        fix += ", or let the search run longer"
    return NoFeasiblePlan(
        got=f"no plan within {' and '.join(limits_of(objective))}: "
        f"the fastest found is {_speed(objective, does)}",
        allowed=allowed,
        fix=fix,
    )


def too_dear(
    request: PlanRequest, objective: Objective, simulated: Iterable[Predicted]
) -> NoFeasiblePlan | None:
    """Return the error for a limit of cost that none of these plans keeps; None if some
    plan keeps it, or if no plan has a price."""
    most = objective.max_usd_per_hour
    plans = [p for p in simulated if p.usd_per_hour is not None]
    prices = [p.usd_per_hour for p in plans if p.usd_per_hour is not None]
    if most is None or not prices or min(prices) <= most:
        return None
    nodes = [
        price * node.count
        for node in request.cluster.nodes
        if (price := device_price_per_hour(node, request.usd_per_kwh)) is not None
    ]
    allowed = _NOT_KNOWN
    if min(nodes) > most:
        allowed = f"{min(nodes):g} USD per hour or more: no node costs less"
    return NoFeasiblePlan(
        got=f"no plan within {most:g} USD per hour: the cheapest found costs "
        f"{min(prices):.4g}",
        allowed=allowed,
        fix=_affordable(objective, plans),
    )


def _affordable(objective: Objective, plans: Sequence[Predicted]) -> str:
    """Return options that some plan meets: the cheapest that is fast enough, or the
    cheapest of all with its speed."""
    least = objective.min_tokens_per_s or 0.0
    fast = [plan for plan in plans if plan.tokens_per_s >= least]
    cheapest = min(fast or plans, key=lambda plan: plan.usd_per_hour or math.inf)
    assert cheapest.usd_per_hour is not None
    dollars = f"give --max-usd-per-hour {_rounded_up(cheapest.usd_per_hour):g}"
    return dollars if fast else f"{dollars}, and {_fast_enough(objective, cheapest)}"


def _fast_enough(objective: Objective, plan: Predicted) -> str:
    """Return the limit of time that a plan meets, as options."""
    does = plan.tokens_per_s
    if objective.tokens is None:
        return f"allow {does:,.0f} tokens per second"
    hours = _rounded_up(objective.tokens / does / 3600)
    return f"give --deadline-hours {hours:g}"


def _speed(objective: Objective, tokens_per_s: float) -> str:
    """Return a speed as text: hours for the tokens if their number is known."""
    if objective.tokens is None:
        return f"{tokens_per_s:,.0f} tokens per second"
    return f"{objective.tokens / tokens_per_s / 3600:,.4g} hours"


def _rounded_up(value: float) -> float:
    """Return the value rounded up to `_DIGITS`, so that the advised limit suffices."""
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - _DIGITS)
    return math.ceil(value / unit * (1 + 1e-9)) * unit
