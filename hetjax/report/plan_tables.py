# SPDX-License-Identifier: Apache-2.0
"""A plan that was found, for people as tables, for machines as one JSON object.

Owns the order of the tables, the bars and the keys. Does not own the words and figures
(`plan_rows.py`) nor the page (`plan_html.py`).
"""

import json
import math
from collections.abc import Iterator
from typing import Any

from hetjax.errors import NoFeasiblePlan
from hetjax.planner.model.objectives import expected_goodput
from hetjax.planner.model.seating import idle_devices
from hetjax.planner.search.comparison import Planned
from hetjax.planner.search.find import Found
from hetjax.planner.search.idle import Idle
from hetjax.plans.files import plan_json
from hetjax.plans.plan import Plan
from hetjax.plans.table import aligned
from hetjax.report.binding import binding
from hetjax.report.certified import found_plan
from hetjax.report.plan_rows import (
    BASELINES,
    CHANGES,
    STAGES,
    WISHES,
    MemoryBar,
    baseline_rows,
    change_rows,
    memory_bars,
    num_devices,
    sentences,
    stage_rows,
    step_line,
    wish_rows,
)
from hetjax.report.prediction import values, with_prediction
from hetjax.schedule.predicted import Predicted

_BAR = 40  # letters
_LETTERS = {"static": "#", "residuals": "=", "activations": "+", "workspace": "-"}


def plan_of(planned: Planned) -> Plan:
    """Return the plan as its file has it, with the prediction in it."""
    return found_plan(planned.found)


def tables(planned: Planned) -> str:
    """Return everything that is known as aligned text."""
    title = planned.best.plan.title
    lines = [title, f"times: {planned.best.times_from}", ""]
    lines += [*aligned(STAGES, stage_rows(planned)), ""]
    lines += [*_memory(planned), ""]
    lines += [step_line(planned.best), *sentences(planned)]
    rest = (
        (BASELINES, baseline_rows(planned)),
        (WISHES, wish_rows(planned)),
        (CHANGES, change_rows(planned)),
    )
    for header, rows in rest:
        if rows:
            lines += ["", *aligned(header, rows)]
    return "\n".join(lines)


def plan_values(planned: Planned) -> dict[str, Any]:
    """Return the same as the tables, and more digits, for JSON."""
    best, cluster = planned.best, planned.request.cluster
    found, bound = planned.found, binding(best)
    told = values(best) | {
        "cluster": cluster.name,
        "objective": planned.objective.wish,
        "goodput": expected_goodput(best, cluster, planned.objective),
        "usd_per_hour": best.usd_per_hour,
        "lower_bound_s": found.lower_bound_s,
        "gap": found.gap,
        "why_no_bound": found.bound.why or None,
        "model_time_s": found.model_time_s,
        "model_bound_s": found.model_bound_s,
        "model_gap": found.model_gap,
        "source": found.source,
        "step_time_alone_s": None
        if isinstance(planned.alone, NoFeasiblePlan)
        else planned.alone.best.simulation.step_time_s,
        "search_s": found.search_s,
        "left_out": list(planned.left_out),
        "binds": {
            "what": bound.what,
            "busiest": bound.busiest,
            "busy_share": bound.busy_share,
            "waiting_share": bound.waiting_share,
            "link": bound.link,
            "link_share": bound.link_share,
            "tight_devices": list(bound.tight_devices),
        },
        "idle_devices": {
            name: list(devices)
            for name, devices in idle_devices(best.plan, cluster).items()
        },
        "idle": [_idle_values(idle) for idle in planned.idle],
        "plan": json.loads(plan_json(plan_of(planned))),
    }
    return told | _answers(planned)


def _answers(planned: Planned) -> dict[str, Any]:
    """What was asked besides the plan."""
    told: dict[str, Any] = {}
    if planned.moved is not None:
        told["moved_bytes"] = planned.moved.moved_bytes
        told["move_s"] = planned.moved.move_s
    if planned.baselines is not None:
        told["baselines"] = {
            name: _judged_values(judged) for name, judged in planned.baselines.items()
        }
    if planned.pareto:
        told["pareto"] = {
            found.objective.wish: _wish_values(found) for found in planned.pareto
        }
    if planned.what_if:
        told["what_if"] = {
            case.name: {
                "step_time_s": case.step_time_s,
                "tokens_per_s": case.tokens_per_s,
            }
            for case in planned.what_if
        }
    return told


def _idle_values(idle: Idle) -> dict[str, Any]:
    """What is idle, and the best plan with more of it."""
    instead = idle.instead
    return {
        "kind": idle.kind,
        "devices": {name: list(devices) for name, devices in idle.devices.items()},
        "worse": idle.worse,
        "instead": None if instead is None else _judged_values(instead),
    }


def _judged_values(judged: Predicted | NoFeasiblePlan) -> dict[str, Any]:
    if isinstance(judged, NoFeasiblePlan):
        return {"step_time_s": None, "why": judged.got}
    return {
        "step_time_s": judged.simulation.step_time_s,
        "tokens_per_s": judged.tokens_per_s,
        "usd_per_million_tokens": judged.usd_per_million_tokens,
        "num_devices": num_devices(judged.plan),
        "plan": json.loads(plan_json(with_prediction(judged))),
    }


def _wish_values(found: Found) -> dict[str, Any]:
    best = found.best
    return {
        "step_time_s": best.simulation.step_time_s,
        "tokens_per_s": best.tokens_per_s,
        "usd_per_million_tokens": best.usd_per_million_tokens,
        "usd_per_hour": best.usd_per_hour,
        "goodput": expected_goodput(best, found.request.cluster, found.objective),
        "num_devices": num_devices(best.plan),
        "gap": found.gap,
        "plan": json.loads(plan_json(found_plan(found))),
    }


def _memory(planned: Planned) -> Iterator[str]:
    """The legend of the bars, then the bars."""
    legend = ", ".join(f"{letter} {part}" for part, letter in _LETTERS.items())
    bars = memory_bars(planned)
    rows = [(bar.name, f"|{bar_letters(bar)}|", bar.told) for bar in bars]
    yield from aligned(("memory", legend, ""), rows)


def bar_letters(bar: MemoryBar, width: int = _BAR) -> str:
    """Return a bar of text; parts end where their sum rounds to."""
    letters, held = "", 0
    for part, size in bar.parts.items():
        held += size
        end = math.floor(width * held / bar.scale_bytes + 0.5)
        letters += _LETTERS[part] * (min(end, width) - len(letters))
    return letters.ljust(width, ".")
