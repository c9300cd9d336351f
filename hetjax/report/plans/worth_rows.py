# SPDX-License-Identifier: Apache-2.0
"""Describes what devices are worth: idle ones, and the best plans without a part.

A part is a kind of device, a class of nodes or a zone; the best plan on it alone is
shown, too. Owns the words and the rows. Does not own how they are laid out (`found.py`,
`html/plan_page.py`) nor the search for these plans (`planner/search/`).
"""

import math
from collections.abc import Iterator

from hetjax.planner.search.comparison import Planned
from hetjax.planner.search.idle import Idle
from hetjax.planner.search.worth import Instead
from hetjax.report.layout_rows import spelled
from hetjax.report.metrics import ms
from hetjax.report.plans.step_rows import Row
from hetjax.schedule.predicted import Predicted

_NONE, _UNKNOWN = "none near", "unknown"  # after a whole search, and a short one
PARTS: Row = ("part", "devices", "used", "without it", "alone")


def idle_lines(planned: Planned) -> Iterator[str]:
    """Yield which devices are idle in the plan, and the best plan with more of them."""
    num_devices = planned.request.cluster.num_devices
    if not planned.idle:
        yield f"all {num_devices} devices are used"
    for idle in planned.idle:
        num = sum(map(len, idle.devices.values()))
        shown = [f"{name}/{spelled(ds)}" for name, ds in idle.devices.items()]
        more = f" and on {len(shown) - 8} more nodes" if len(shown) > 8 else ""
        why = "not worth using" if idle.is_searched else "not used"
        yield (
            f"{why}: {' '.join(shown[:8])}{more} ({num} of {num_devices} devices): "
            f"{_with_more(planned, idle)}"
        )


def _with_more(planned: Planned, idle: Idle) -> str:
    """Return the evidence: the best plan with more of this kind."""
    early = "" if idle.is_searched else " before the search ended"
    if idle.instead is None or idle.worse is None:
        wished = planned.objective
        is_limited = wished.max_usd_per_hour or wished.min_tokens_per_s
        what = "is within your limits" if is_limited else "fits"
        priced = " and has a price" if wished.wish == "cost" else ""
        why = f"that {what}{priced}{early}"
        return f"no plan with more of {idle.node_class} was found {why}"
    figure = _worse(planned, idle.instead, idle.worse)
    return f"the best plan found with more of {idle.node_class}{early} has {figure}"


def _worse(planned: Planned, instead: Predicted, worse: float) -> str:
    """Return another plan's figure, and its excess over the best plan under h1f1b."""
    figure, change = _by_wish(planned, instead, worse)
    step = "a step of " if planned.objective.wish != "cost" else ""
    found = planned.found
    under = "" if found.best.plan == found.best_h1f1b.plan else ", both under h1f1b"
    return f"{step}{figure}, {change}{under}"


def _by_wish(planned: Planned, instead: Predicted, worse: float) -> tuple[str, str]:
    """Return another plan's figure by the objective, and how much worse it is."""
    wish = planned.objective.wish
    figure = f"{ms(instead.simulation.step_time_s)} ms"
    if wish == "cost":
        figure = f"{instead.usd_per_million_tokens:.3g} USD per million tokens"
    than = {"time": "longer", "cost": "dearer", "goodput": "longer, lost time included"}
    if math.isinf(worse):  # the best plan costs nothing
        return figure, than[wish]
    return figure, f"{max(worse, 0.0):.1%} {than[wish]}"


def part_rows(planned: Planned) -> list[Row]:
    """Return a row per part: the best plans without it, and on it alone.

    `~` marks plans of a quick search, which may have missed better ones.
    """
    return [
        (
            worth.part,
            str(worth.num_devices),
            str(worth.num_used),
            _instead(planned, worth.without),
            _instead(planned, worth.alone),
        )
        for worth in planned.parts
    ]


def part_notes(planned: Planned) -> list[str]:
    """Return the notes below these rows."""
    notes: list[str] = []
    plans = [plan for part in planned.parts for plan in (part.without, part.alone)]
    if any(plan is not None and not plan.is_searched for plan in plans):
        notes.append("~: from a quick look, so a better plan may exist on these nodes")
    if None in plans and planned.cut_short:
        notes.append(
            f"{_UNKNOWN}: the search ended before it found a plan near the best"
        )
    elif None in plans:
        notes.append(f"{_NONE}: no plan within the limits came near the best")
    base = planned.parts_with or planned.found.best_h1f1b
    if planned.parts and planned.best.plan != base.plan:
        figure, _ = _by_wish(planned, base, 0.0)
        notes.append(f"all of these use h1f1b; the best plan under h1f1b has {figure}")
    return notes


def _instead(planned: Planned, instead: Instead | None) -> str:
    """Return the figure of the best plan of some nodes."""
    if instead is None:
        return _UNKNOWN if planned.cut_short else _NONE
    mark = "" if instead.is_searched else "~"
    figure, change = _by_wish(planned, instead.predicted, instead.worse)
    return f"{mark}{figure} ({change})"
