# SPDX-License-Identifier: Apache-2.0
"""What a simulated step tells: for people as tables, for machines as one JSON object.

Owns the columns, the keys, and which numbers are no prediction. Does not own the
simulation (`schedule/`), nor where plans, clusters and times come from
(`cli/simulate.py`, `planner/model/costing.py`).
"""

import math
from dataclasses import replace
from typing import Any

from hetjax.errors import BadInput
from hetjax.plans.plan import Plan, Prediction
from hetjax.plans.table import aligned
from hetjax.schedule.predicted import Predicted
from hetjax.schedule.simulation.result import Lane, lane_of

_GIB = 2**30


def check_finite(predicted: Predicted) -> None:
    """Raise BadInput if there is no number for what is told of the step."""
    told = {
        "seconds": predicted.simulation.step_time_s,
        "tokens per second": predicted.tokens_per_s,
        "USD per million tokens": predicted.usd_per_million_tokens or 0.0,
    }
    for what, value in told.items():
        if not math.isfinite(value):
            raise BadInput(
                got=f"a step of {value:g} {what}",
                allowed="finite times and prices",
                fix="correct the figures and prices in the cluster file",
            )


def with_prediction(predicted: Predicted) -> Plan:
    """Return the plan with what was predicted of it written into it."""
    peaks = {device: use.total_bytes for device, use in predicted.memory.items()}
    return replace(
        predicted.plan,
        predicted=Prediction(
            step_time_s=predicted.simulation.step_time_s,
            lower_bound_s=predicted.lower_bound_s,
            gap=predicted.gap,
            tokens_per_s=predicted.tokens_per_s,
            usd_per_million_tokens=predicted.usd_per_million_tokens,
            peak_memory_bytes=peaks,
        ),
    )


def headline(predicted: Predicted) -> str:
    """Return the step in one line."""
    simulation = predicted.simulation
    return (
        f"step time {ms(simulation.step_time_s)} ms, "
        f"{predicted.tokens_per_s:,.0f} tokens/s, bubble {simulation.bubble:.1%}"
    )


def tables(predicted: Predicted) -> str:
    """Return the stages, the devices and the step as aligned text."""
    title = predicted.plan.title
    return "\n".join(
        [
            title,
            f"times: {predicted.times_from}",
            "",
            *aligned(_STAGE_HEADER, _stage_rows(predicted)),
            "",
            *aligned(_DEVICE_HEADER, _device_rows(predicted)),
            "",
            headline(predicted),
            *_second_line(predicted),
        ]
    )


def _second_line(predicted: Predicted) -> list[str]:
    """The bound and the price, where they are known."""
    bound_s, gap = predicted.lower_bound_s, predicted.gap
    usd, parts = predicted.usd_per_million_tokens, list[str]()
    if bound_s is not None and gap is not None:
        parts.append(f"lower bound {ms(bound_s)} ms (gap {gap:.1%})")
    if predicted.bound.is_false:
        parts.append(predicted.bound.why)
    if usd is not None:
        parts.append(f"{usd:.3g} USD per million tokens")
    return [", ".join(parts)] if parts else []


def values(predicted: Predicted) -> dict[str, Any]:
    """Return the same as the tables, and more digits, for JSON."""
    plan, simulation = predicted.plan, predicted.simulation
    return {
        "model": plan.model,
        "seq_len": plan.seq_len,
        "global_batch": plan.global_batch,
        "schedule": plan.schedule,
        "times_from": predicted.times_from,
        "step_time_s": simulation.step_time_s,
        "tokens_per_s": predicted.tokens_per_s,
        "bubble_share": simulation.bubble,
        "lower_bound_s": predicted.lower_bound_s,
        "gap": predicted.gap,
        "usd_per_million_tokens": predicted.usd_per_million_tokens,
        "stages": _stage_values(predicted),
        "devices": _device_values(predicted),
    }


def _stage_values(predicted: Predicted) -> list[dict[str, Any]]:
    found = []
    for r, s, stage in predicted.plan.stages():
        times = predicted.costs.times[r, s]
        found.append(
            {
                "replica": r,
                "stage": s,
                "node": stage.node,
                "devices": list(stage.devices),
                "layers": list(stage.layers),
                "remat": stage.remat,
                "launch_ahead": stage.launch_ahead,
                "forward_s": times.forward_s,
                "backward_s": times.backward_s,
                "update_s": times.update_s,
            }
        )
    return found


def _device_values(predicted: Predicted) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for (node, devices), shares in predicted.simulation.shares.items():
        for device in (f"{node}/{index}" for index in devices):
            has_bytes = predicted.capacity_bytes[device]
            found[device] = {
                "busy_s": shares.busy_s,
                "waiting_s": shares.waiting_s,
                "idle_s": shares.idle_s,
                "peak_memory_bytes": predicted.memory[device].total_bytes,
                "memory_bytes": has_bytes if math.isfinite(has_bytes) else None,
            }
    return found


_STAGE_HEADER = (
    "replica",
    "stage",
    "node",
    "devices",
    "layers",
    "remat",
    "launch-ahead",
    "forward ms",
    "backward ms",
    "memory of capacity",
)
_DEVICE_HEADER = ("devices", "stages", "busy", "waiting", "idle")


def _stage_rows(predicted: Predicted) -> list[tuple[str, ...]]:
    rows = []
    told: set[Lane] = set()
    for r, s, stage in predicted.plan.stages():
        lane = stage.node, stage.devices
        times = predicted.costs.times[r, s]
        rows.append(
            (
                str(r) if s == 0 else "",
                str(s),
                stage.node,
                ",".join(map(str, stage.devices)),
                f"{stage.layers[0]}..{stage.layers[1] - 1}",
                stage.remat,
                str(stage.launch_ahead),
                ms(times.forward_s),
                ms(times.backward_s),
                "" if lane in told else _memory(predicted, lane),  # interleaved: once
            )
        )
        told.add(lane)
    return rows


def _device_rows(predicted: Predicted) -> list[tuple[str, ...]]:
    """One row per lane: its devices do the same at the same time."""
    stages: dict[Lane, list[str]] = {}
    for (r, s), lane in lane_of(predicted.plan).items():
        stages.setdefault(lane, []).append(f"r{r}.s{s}")
    step_time_s = predicted.simulation.step_time_s
    rows = []
    for lane, shares in predicted.simulation.shares.items():
        node, devices = lane
        parts = (shares.busy_s, shares.waiting_s, shares.idle_s)
        rows.append(
            (
                f"{node}/{','.join(map(str, devices))}",
                " ".join(stages[lane]),
                *(f"{part / step_time_s:.1%}" for part in parts),
            )
        )
    return rows


def _memory(predicted: Predicted, lane: Lane) -> str:
    device = f"{lane[0]}/{lane[1][0]}"
    used, has = predicted.memory[device].total_bytes, predicted.capacity_bytes[device]
    if not math.isfinite(has):
        return f"{used / _GIB:.2f} GiB"
    return f"{used / _GIB:.2f} of {has / _GIB:.2f} GiB ({used / has:.1%})"


def ms(seconds: float) -> str:
    """Return seconds as milliseconds, three digits after the point below 100."""
    milliseconds = seconds * 1e3
    return f"{milliseconds:,.{1 if milliseconds >= 100 else 3}f}"
