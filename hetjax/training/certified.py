# SPDX-License-Identifier: Apache-2.0
"""A found plan as a plan file: its prediction with the certified bound in it.

Owns the words and figures of the certificate. Does not own the search (`planner/`) nor
other predictions (`prediction.py`).
"""

from dataclasses import replace

from hetjax.planner.find import Found
from hetjax.plans.plan import Plan
from hetjax.training.prediction import ms, with_prediction

SPACE = (  # what the bound is about, to be said wherever it is
    "1F1B family, fused backward, no interleaving, the modelled costs"
)


def found_plan(found: Found) -> Plan:
    """Return the plan with what was predicted of it and the certified bound."""
    plan = with_prediction(found.best)
    assert plan.predicted is not None
    predicted = replace(
        plan.predicted, lower_bound_s=bound_s(found), gap=bound_gap(found)
    )
    return replace(plan, predicted=predicted)


def bound_s(found: Found) -> float | None:
    """Return the certified bound; None where the search proved none."""
    return found.lower_bound_s if found.lower_bound_s > 0 else None


def bound_gap(found: Found) -> float | None:
    """Return how far the step is above the certified bound, as a share of it."""
    return found.gap if found.lower_bound_s > 0 else None


def certificate(found: Found) -> str:
    """Return the predicted step and the bound in a few words."""
    told = f"step time {ms(found.best.simulation.step_time_s)} ms predicted"
    gap = bound_gap(found)
    return told if gap is None else f"{told}, at most {gap:.1%} above the best there is"
