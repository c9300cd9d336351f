# SPDX-License-Identifier: Apache-2.0
"""Defines the result of a predicted step: what it says, shows, draws and writes.

Owns the columns, the keys, which numbers are no prediction, and the words of the
certified bound. Does not own the drawing (`pictures/timeline.py`), the simulation
(`schedule/`) nor the search (`planner/`).
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Cluster
from hetjax.errors import BadInput
from hetjax.plans.plan import Plan, Prediction
from hetjax.plans.table import aligned, html_table
from hetjax.report.certainty import certainty_values, how_sure_lines, memory_lines
from hetjax.report.metrics import ms
from hetjax.report.pictures.picture import Picture
from hetjax.report.pictures.timeline import timeline_picture
from hetjax.schedule.certainty import Certainty
from hetjax.schedule.predicted import Predicted
from hetjax.schedule.simulation.result import Lane, lane_of
from hetjax.schedule.simulation.trace import Span, perfetto, simulated_spans

if TYPE_CHECKING:  # a run that has its plan does not import the planner
    from hetjax.planner.search.find import Found

GIB = 2**30
SPACES = {  # the plans that a bound covers, named with every bound
    "whole": "1F1B family, fused backward, no interleaving, the modelled costs",
    "split": "any schedule without interleaving, the modelled costs",
    "interleaved": "any schedule, devices that never wait, the modelled costs",
}
_SHOWN = 0.0005  # of a step: the least gain that a tenth of a percent shows
_STAGE_FIGURES = ("forward ms", "backward ms", "memory of capacity")
_DEVICE_HEADER = ("devices", "stages", "busy", "waiting", "idle")


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One predicted step of a plan: `print(step)`, `step.draw()`.

    Times are seconds; `gap` and `lower_bound_s` are None if no bound is known. `surely`
    computes how sure the prediction is, which takes more simulations.
    """

    predicted: Predicted
    surely: Callable[[], Certainty] | None = None

    @property
    def certainty(self) -> Certainty | None:
        """How sure the prediction is; None if unknown."""
        return None if self.surely is None else self.surely()

    @property
    def plan(self) -> Plan:
        """The plan as simulated, with the prediction in it."""
        found = self.predicted
        peaks = {device: use.total_bytes for device, use in found.memory.items()}
        prediction = Prediction(
            step_time_s=self.step_time_s,
            lower_bound_s=self.lower_bound_s,
            gap=self.gap,
            tokens_per_s=self.tokens_per_s,
            usd_per_million_tokens=found.usd_per_million_tokens,
            peak_memory_bytes=peaks,
        )
        return replace(found.plan, predicted=prediction)

    @property
    def step_time_s(self) -> float:
        return self.predicted.simulation.step_time_s

    @property
    def tokens_per_s(self) -> float:
        return self.predicted.tokens_per_s

    @property
    def lower_bound_s(self) -> float | None:
        return self.predicted.lower_bound_s

    @property
    def gap(self) -> float | None:
        return self.predicted.gap

    def values(self) -> dict[str, Any]:
        """Return all numbers under the names that `simulate --json` gives them."""
        predicted, plan = self.predicted, self.predicted.plan
        return {
            "model": plan.model,
            "seq_len": plan.seq_len,
            "global_batch": plan.global_batch,
            "schedule": plan.schedule,
            "times_from": predicted.times_from,
            "step_time_s": self.step_time_s,
            "tokens_per_s": self.tokens_per_s,
            "bubble_share": predicted.simulation.bubble,
            "lower_bound_s": self.lower_bound_s,
            "gap": self.gap,
            "usd_per_million_tokens": predicted.usd_per_million_tokens,
            "stages": _stage_values(predicted),
            "devices": _device_values(predicted),
            **certainty_values(self.certainty, plan.tokens_per_step),
        }

    def draw(self) -> Picture:
        """Draw what every device does when; BadInput without matplotlib."""
        plan = self.predicted.plan
        title = f"{plan.model}, {plan.schedule}: {headline(self.predicted)}"
        return timeline_picture(
            predicted_spans(self.predicted), plan, self.predicted.costs, title
        )

    def write_trace(self, path: str | Path) -> None:
        """Write the timeline to open in ui.perfetto.dev."""
        Path(path).write_text(json.dumps(perfetto(predicted_spans(self.predicted))))

    def __str__(self) -> str:
        predicted = self.predicted
        return "\n".join(
            [
                predicted.plan.title,
                f"times: {predicted.times_from}",
                "",
                *aligned(_stage_header(predicted.plan), _stage_rows(predicted)),
                "",
                *aligned(_DEVICE_HEADER, _device_rows(predicted)),
                "",
                headline(predicted),
                *self._second_lines(),
            ]
        )

    def _repr_html_(self) -> str:
        predicted = self.predicted
        times = f"times: {predicted.times_from}"
        said = headline(predicted), *self._second_lines()
        stages = html_table(
            _stage_header(predicted.plan),
            _stage_rows(predicted),
            title=predicted.plan.title,
            notes=[times],
        )
        return stages + html_table(_DEVICE_HEADER, _device_rows(predicted), notes=said)

    def _second_lines(self) -> list[str]:
        sure = self.certainty
        lines = [] if sure is None else how_sure_lines(sure)
        return [
            *_second_line(self.predicted),
            *lines,
            *memory_lines(self.predicted),
        ]


def check_finite(predicted: Predicted) -> None:
    """Raise BadInput if a figure of the step is not a finite number."""
    figures = {
        "seconds": predicted.simulation.step_time_s,
        "tokens per second": predicted.tokens_per_s,
        "USD per million tokens": predicted.usd_per_million_tokens or 0.0,
    }
    for what, value in figures.items():
        if not math.isfinite(value):
            raise BadInput(
                got=f"a step of {value:g} {what}",
                allowed="finite times and prices",
                fix="correct the figures and prices in the cluster file",
            )


def headline(predicted: Predicted) -> str:
    """Return the step in one line."""
    simulation = predicted.simulation
    return (
        f"step time {ms(simulation.step_time_s)} ms, "
        f"{predicted.tokens_per_s:,.0f} tokens/s, bubble {simulation.bubble:.1%}"
    )


CPU_GUESS = (
    "the catalogue cannot know how fast this CPU is, so measured and predicted "
    "times are not compared; `hetjax profile` measures times to predict and plan with"
)


def guesses_a_cpu(predicted: Predicted, cluster: Cluster) -> bool:
    """Return whether the step rests on the catalogue's stand-in for any CPU.

    CPUs differ too much for one figure, so such a step must not be compared with a
    measured one.
    """
    used = {cluster.node(stage.node) for _, _, stage in predicted.plan.stages()}
    unknown = any(
        canonical_name(node.device) == "cpu" and node.peak_tflops is None
        for node in used
    )
    return unknown and predicted.times_from.startswith("estimated")


def predicted_spans(predicted: Predicted) -> list[Span]:
    """Return what every device does when, in the predicted step."""
    return simulated_spans(
        predicted.simulation, predicted.plan, predicted.costs, predicted.tied
    )


def found_plan(found: "Found") -> Plan:
    """Return the plan with its prediction and the certified bound."""
    plan = SimulatedStep(found.best).plan
    assert plan.predicted is not None
    predicted = replace(
        plan.predicted, lower_bound_s=found.lower_bound_s, gap=found.gap
    )
    return replace(plan, predicted=predicted)


def certificate(found: "Found") -> str:
    """Return the predicted step and the bound in a few words."""
    predicted = f"step time {ms(found.best.simulation.step_time_s)} ms predicted"
    gap = found.gap
    if gap is not None:
        return f"{predicted}, at most {gap:.1%} above the best possible"
    return f"{predicted}; {found.bound.why}" if found.bound.is_false else predicted


def bound_line(found: "Found") -> str:
    """Return the bound in a line, or that none is known, and why."""
    least_s, gap = found.lower_bound_s, found.gap
    if least_s is None:
        return f"lower bound: none is known ({found.bound.why})"
    space = SPACES[found.space or "whole"]
    if gap is None:
        return (
            f"lower bound {ms(least_s)} ms for plans of these choices ({space}); the "
            "given plan is not one of them"
        )
    line = (
        f"lower bound {ms(least_s)} ms (gap {gap:.1%}): no plan of these choices is "
        f"faster ({space})"
    )
    if found.split_bound is not None and found.split_bound.step_s:
        line += f"; without interleaving {ms(found.split_bound.step_s)} ms"
    return line


def h1f1b_line(found: "Found") -> str | None:
    """Return what a schedule other than h1f1b gains; None if it gains nothing."""
    step_s, whole_s = (
        each.simulation.step_time_s for each in (found.best, found.best_h1f1b)
    )
    if step_s >= whole_s * (1 - _SHOWN):
        return None
    gap = found.whole_gap
    to_bound = "" if gap is None else f" (gap {gap:.1%} to the bound of such plans)"
    return (
        f"its schedule makes a step {1 - step_s / whole_s:.1%} shorter: the best plan "
        f"under h1f1b takes {ms(whole_s)} ms{to_bound}"
    )


def memory_label(used_bytes: float, has_bytes: float) -> str:
    """Return the memory in use, with its share of the capacity if that is known."""
    if not math.isfinite(has_bytes):
        return f"{used_bytes / GIB:.2f} GiB"
    share = used_bytes / has_bytes
    return f"{used_bytes / GIB:.2f} of {has_bytes / GIB:.2f} GiB ({share:.1%})"


def lane_name(lane: Lane) -> str:
    """Return the devices of a lane, as in "a100-0/0,1"."""
    return f"{lane[0]}/{','.join(map(str, lane[1]))}"


def first_device(lane: Lane) -> str:
    """Return the device that stands for a lane: all of a lane hold and do the same."""
    return f"{lane[0]}/{lane[1][0]}"


def _second_line(predicted: Predicted) -> list[str]:
    """Return the bound and the price, if they are known."""
    bound_s, gap = predicted.lower_bound_s, predicted.gap
    usd, parts = predicted.usd_per_million_tokens, list[str]()
    if bound_s is not None and gap is not None:
        parts.append(f"lower bound {ms(bound_s)} ms (gap {gap:.1%})")
    if predicted.bound.is_false:
        parts.append(predicted.bound.why)
    if usd is not None:
        parts.append(f"{usd:.3g} USD per million tokens")
    return [", ".join(parts)] if parts else []


def _stage_values(predicted: Predicted) -> list[dict[str, Any]]:
    times = predicted.costs.times
    return [
        {
            "replica": r,
            "stage": s,
            "node": stage.node,
            "devices": list(stage.devices),
            "layers": list(stage.layers),
            "remat": stage.remat,
            "launch_ahead": stage.launch_ahead,
            "forward_s": times[r, s].forward_s,
            "backward_s": times[r, s].backward_s,
            "update_s": times[r, s].update_s,
        }
        for r, s, stage in predicted.plan.stages()
    ]


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
                **_memory_certainty_values(predicted, device),
            }
    return found


def _memory_certainty_values(predicted: Predicted, device: str) -> dict[str, Any]:
    sure = predicted.memory_certainty.get(device)
    if sure is None:
        return {"peak_memory_interval_bytes": None, "fits": None}
    interval = [sure.low_bytes, sure.high_bytes]
    return {"peak_memory_interval_bytes": interval, "fits": sure.fits}


def _stage_header(plan: Plan) -> tuple[str, ...]:
    return (*_cells(plan.columns), *_STAGE_FIGURES)


def _cells(row: tuple[str, ...]) -> tuple[str, ...]:
    """Return a plan's row without meshes and microbatches."""
    return (*row[:4], *row[5:-1])


def _stage_rows(predicted: Predicted) -> list[tuple[str, ...]]:
    rows, seen = [], set[Lane]()
    plan = predicted.plan
    for row, (key, lane) in zip(plan.rows(), lane_of(plan).items(), strict=True):
        times, device = predicted.costs.times[key], first_device(lane)
        used_bytes = predicted.memory[device].total_bytes
        memory = memory_label(used_bytes, predicted.capacity_bytes[device])
        if lane in seen:  # interleaved: show memory once
            memory = ""
        seen.add(lane)
        passes = ms(times.forward_s), ms(times.backward_s)
        rows.append((*_cells(row), *passes, memory))
    return rows


def _device_rows(predicted: Predicted) -> list[tuple[str, ...]]:
    """Return one row per lane: its devices do the same at the same time."""
    stages: dict[Lane, list[str]] = {}
    for (r, s), lane in lane_of(predicted.plan).items():
        stages.setdefault(lane, []).append(f"r{r}.s{s}")
    step_time_s = predicted.simulation.step_time_s
    rows = []
    for lane, shares in predicted.simulation.shares.items():
        parts = (shares.busy_s, shares.waiting_s, shares.idle_s)
        percentages = (f"{part / step_time_s:.1%}" for part in parts)
        rows.append((lane_name(lane), " ".join(stages[lane]), *percentages))
    return rows
