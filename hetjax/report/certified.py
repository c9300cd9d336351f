# SPDX-License-Identifier: Apache-2.0
"""A found plan as a plan file: its prediction with the certified bound in it.

Owns the words and figures of the certificate. Does not own the search (`planner/`) nor
other predictions (`prediction.py`).
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from hetjax.plans.plan import Plan
from hetjax.report.prediction import ms, with_prediction

if TYPE_CHECKING:  # a run that has its plan does not import the planner
    from hetjax.planner.search.find import Found

SPACE = (  # what the bound is about, to be said wherever it is
    "1F1B family, fused backward, no interleaving, the modelled costs"
)


def found_plan(found: "Found") -> Plan:
    """Return the plan with what was predicted of it and the certified bound."""
    plan = with_prediction(found.best)
    assert plan.predicted is not None
    predicted = replace(
        plan.predicted, lower_bound_s=found.lower_bound_s, gap=found.gap
    )
    return replace(plan, predicted=predicted)


def certificate(found: "Found") -> str:
    """Return the predicted step and the bound in a few words."""
    told = f"step time {ms(found.best.simulation.step_time_s)} ms predicted"
    gap = found.gap
    if gap is not None:
        return f"{told}, at most {gap:.1%} above the best there is"
    return f"{told}; {found.bound.why}" if found.bound.is_false else told


def bound_line(found: "Found") -> str:
    """Return the bound in a line; that there is none, and why."""
    least_s, gap = found.lower_bound_s, found.gap
    if least_s is None:
        return f"lower bound: none is known ({found.bound.why})"
    if gap is None:
        return (
            f"lower bound {ms(least_s)} ms of plans of these choices ({SPACE}); this "
            "plan, which was given, is none of them"
        )
    return (
        f"lower bound {ms(least_s)} ms (gap {gap:.1%}): no plan of these choices is "
        f"faster ({SPACE})"
    )
