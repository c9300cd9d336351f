# SPDX-License-Identifier: Apache-2.0
"""Makes the page of a run.

Owns its order, its headline numbers, curves and tables. Does not own the numbers
(`run_record.py`), their words (`report/metrics.py`), what is shown of any plan
(`plan_view.py`) nor how it looks (`templates/run.html`).
"""

from collections.abc import Iterator, Mapping

from hetjax.report.html.curves import Chart, Curve, chart
from hetjax.report.html.pages import page
from hetjax.report.html.plan_view import plan_view
from hetjax.report.html.timeline_view import traced_view
from hetjax.report.journals import event_details
from hetjax.report.metrics import HEADLINES, METRICS, STEP_TIME, Axes, ms
from hetjax.report.plans.binding import binding, binding_line
from hetjax.report.plans.step_rows import Row
from hetjax.report.prediction import CPU_GUESS
from hetjax.report.run_record import Line, RunRecord

_RECOVERIES = (
    "step",
    "when",
    "what happened",
    "took",
    "longest phase",
    "lost",
    "moved",
)
_EVENTS = ("step", "when", "event", "")
_LOOKS = ("first", "second")  # of the curves of measured numbers
_MIB = 2**20


def run_page(run: RunRecord) -> str:
    """Return the page."""
    spent_s = run.spent_s
    total_s = sum(spent_s.values()) if spent_s else 0.0
    return page(
        "run.html",
        title=f"Run of {run.plan.model} on {run.cluster.name}",
        subtitle=list(_subtitle(run)),
        command="",
        figures=list(_figures(run)),
        charts=_charts(run),
        step_time=list(_step_time(run)),
        spent=[
            (part, {part: seconds / total_s}, f"{seconds:,.1f} s")
            for part, seconds in (spent_s or {}).items()
            if total_s and seconds
        ],
        recoveries_header=_RECOVERIES,
        recoveries=[_recovery(line) for line in run.recoveries],
        plan=plan_view(run.plan, run.cluster, run.predicted),
        traced=traced_view(run.traced, run.plan, run.cluster, run.predicted),
        events_header=_EVENTS,
        events=[_event(line) for line in run.events],
        settings_header=("setting", "value"),
        settings=[(name, str(value)) for name, value in run.settings.items()],
    )


def _subtitle(run: RunRecord) -> Iterator[str]:
    yield f"{run.run_dir}: step {run.step:,} of {run.settings['steps']:,}, {run.state}"
    yield run.plan.title


def _figures(run: RunRecord) -> Iterator[tuple[str, str | None]]:
    """Yield the headline numbers; None for an unknown one."""
    values = run.values()
    whose = "predicted for the devices" if run.is_simulated else "predicted"
    others = {
        "predicted_step_time_s": (whose, lambda seconds: f"{ms(seconds)} ms"),
        "goodput": ("goodput", "{:.1%}".format),
        "usd_per_million_tokens": ("USD per million tokens", "{:.3g}".format),
    }
    named = {metric.key: (metric.headline_label, metric.format) for metric in HEADLINES}
    for name, (words, form) in (named | others).items():
        yield words, None if values[name] is None else form(values[name])
    yield "recoveries", str(values["recoveries"]) if values["recoveries"] else None


def _charts(run: RunRecord) -> list[Chart]:
    """Return the curves by step, as far as there are any."""
    drawn = dict.fromkeys(metric.axes for metric in METRICS if metric.axes)
    curves = {axes: [*_curves(run, axes)] for axes in drawn}
    return [
        chart(axes.title, found, from_zero=axes.from_zero)
        for axes, found in curves.items()
        if any(curve.points for curve in found)
    ]


def _curves(run: RunRecord, axes: Axes) -> Iterator[Curve]:
    metrics = [metric for metric in METRICS if metric.axes == axes]
    for metric, look in zip(metrics, _LOOKS, strict=False):
        points = [(step, axes.factor * x) for step, x in run.points(metric.key)]
        yield Curve(name=metric.label, look=look, points=points)
    by_plan = run.steps_of_plan
    if axes == STEP_TIME and run.predicted and by_plan and run.is_comparable:
        predicted_ms = axes.factor * run.predicted.simulation.step_time_s
        ends = [(by_plan[i]["step"], predicted_ms) for i in (0, -1)]
        yield Curve(name="predicted", look="target", points=ends)


def _step_time(run: RunRecord) -> Iterator[str]:
    """Yield sentences that compare the predicted and the measured step time."""
    measured_s, predicted = run.median("step_time_s"), run.predicted
    if predicted is None:
        yield f"no step time is predicted: {run.why_not_predicted}"
        return
    predicted_s = predicted.simulation.step_time_s
    from_model = f"{ms(predicted_s)} ms predicted ({predicted.times_from})"
    if measured_s is None:
        yield from_model
    elif run.is_simulated:
        yield (
            f"{ms(measured_s)} ms measured on the CPU here, which stands in for the "
            f"cluster's devices; {from_model} for those"
        )
    else:
        yield f"{ms(measured_s)} ms measured (median), {from_model}"
        if run.is_comparable:
            yield f"measured is {measured_s / predicted_s:.2f} times the predicted time"
        else:
            yield CPU_GUESS
    yield from run.how_sure
    yield f"in the predicted step, {binding_line(binding(predicted))}"
    yield from run.slow
    yield from run.moves


def _recovery(line: Line) -> Row:
    """Return what a change has cost, below `_RECOVERIES`."""
    seconds: Mapping[str, float] = line.get("seconds", {})
    longest = max(seconds, key=lambda phase: seconds[phase], default="")
    most = f"{longest} {seconds[longest]:.1f} s" if longest else ""
    moved = ", ".join(
        f"{size / _MIB:,.1f} MiB from {tier}"
        for tier, size in line.get("bytes", {}).items()
    )
    undone = line.get("lost_steps", 0)
    return (
        f"{line['step']:,}",
        _clock(line),
        str(line.get("reason", "")),
        f"{sum(seconds.values()):.1f} s",
        most,
        f"{undone} steps" if undone else "nothing",
        moved or "nothing",
    )


def _event(line: Line) -> Row:
    return f"{line['step']:,}", _clock(line), str(line["event"]), event_details(line)


def _clock(line: Line) -> str:
    """Return date and time of day, as in "2026-11-23 04:01:02"."""
    return str(line.get("time", "")).replace("T", " ").partition("+")[0]
