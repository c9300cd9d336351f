# SPDX-License-Identifier: Apache-2.0
"""A plan that was found as one page of HTML that needs nothing else.

Owns the page: its style, its order, the bars, and the pictures inside it. Does not own
the words and figures (`plan_rows.py`) nor the pictures (`layout.py`, `timeline.py`).
"""

from base64 import b64encode
from collections.abc import Iterator, Sequence
from html import escape

from hetjax.errors import NoFeasiblePlan
from hetjax.planner.search.comparison import Planned
from hetjax.plans.table import html_table
from hetjax.report.layout import alike_replicas, layout_picture
from hetjax.report.plan_rows import (
    BASELINES,
    CHANGES,
    STAGES,
    WISHES,
    baseline_rows,
    change_rows,
    memory_bars,
    planners,
    sentences,
    stage_rows,
    wish_rows,
)
from hetjax.report.prediction import ms, predicted_spans
from hetjax.report.timeline import timeline_picture

_MOST_ROWS = 48  # devices of the timeline
_COLOURS = {
    "static": "#0072b2",
    "residuals": "#e69f00",
    "activations": "#009e73",
    "workspace": "#999999",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 68rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; }
h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
p { margin: 0.3rem 0; }
.quiet { color: #666; }
.figures { display: flex; flex-wrap: wrap; gap: 0.8rem; margin: 1rem 0; }
.figure { border: 1px solid #ddd; border-radius: 6px; padding: 0.5rem 1rem; }
.figure b { display: block; font-size: 1.35rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.87em; }
th, td { text-align: left; padding: 0.25em 1em 0.25em 0;
  border-bottom: 1px solid #eee; white-space: nowrap; }
th { color: #666; font-weight: normal; }
td.wide { min-width: 20em; white-space: normal; }
.bar { width: 20em; height: 0.9em; background: #eee; }
.bar span { float: left; height: 100%; }
.key { display: inline-block; width: 0.8rem; height: 0.8rem;
  margin: 0 0.3rem 0 0.8rem; }
img { max-width: 100%; border: 1px solid #eee; }
code { background: #f5f5f5; padding: 0.15rem 0.3rem; overflow-wrap: anywhere; }
@page { size: A4; margin: 1.3cm; }
@media print {
  body { margin: 0; padding: 0; max-width: none; font-size: 11px; }
  table { font-size: 10px; }
  h2 { break-after: avoid; }
  img, tr { break-inside: avoid; }
}
"""


def pictures(planned: Planned) -> tuple[bytes, bytes]:
    """Draw the layout as SVG and a step of it as PNG.

    BadInput where matplotlib is not installed.
    """
    best = planned.best
    layout = layout_picture(best.plan, planned.request.cluster, "")
    timeline = timeline_picture(
        predicted_spans(best), best.plan, best.costs, "", shown_replicas(planned)
    )
    return layout.image("svg"), timeline.image("png")


def page(planned: Planned, command: str, layout_svg: bytes, timeline_png: bytes) -> str:
    """Return the page with these pictures in it."""
    plan, cluster = planned.best.plan, planned.request.cluster
    title = f"{plan.model} on {cluster.name}"
    body = [
        f"<h1>Plan for {escape(title)}</h1>",
        f'<p class="quiet">{escape(plan.title)}; times: '
        f"{escape(planned.best.times_from)}</p>",
        *_figures(planned),
        *(f"<p>{escape(line)}</p>" for line in sentences(planned)),
        "<h2>Stages</h2>",
        *html_table(STAGES, stage_rows(planned)),
        "<h2>Layout</h2>",
        _picture("Which node holds which layers", "image/svg+xml", layout_svg),
        "<h2>Memory at its peak</h2>",
        *_memory(planned),
        "<h2>One step, simulated</h2>",
        *_timeline(planned, timeline_png),
        *_answers(planned),
    ]
    if command:
        body += ["<h2>Made with</h2>", f"<p><code>{escape(command)}</code></p>"]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style></head><body>",
            *body,
            "</body></html>",
            "",
        ]
    )


def shown_replicas(planned: Planned) -> list[int]:
    """Return the replicas of the timeline: all, or where those are many the first of
    those that are alike, and of these as many as can be read, at least one."""
    plan = planned.best.plan
    shown = list(range(len(plan.replicas)))
    if _num_rows(planned, shown) > _MOST_ROWS:
        groups = alike_replicas(plan, planned.request.cluster)
        shown = [group[0] for group in groups]
    while len(shown) > 1 and _num_rows(planned, shown) > _MOST_ROWS:
        shown.pop()
    return shown


def _num_rows(planned: Planned, replicas: Sequence[int]) -> int:
    stages = planned.best.plan.stages()
    return sum(len(stage.devices) for r, _, stage in stages if r in replicas)


def _figures(planned: Planned) -> Iterator[str]:
    """The headline numbers, each in a box."""
    best, found = planned.best, planned.found
    least_s, gap = found.lower_bound_s, found.gap
    usd = best.usd_per_million_tokens
    figures = {
        "step time": f"{ms(best.simulation.step_time_s)} ms",
        "tokens/s": f"{best.tokens_per_s:,.0f}",
        "bubble": f"{best.simulation.bubble:.1%}",
        "USD per million tokens": None if usd is None else f"{usd:.3g}",
        "lower bound": None if least_s is None else f"{ms(least_s)} ms",
        "gap to the bound": None if gap is None else f"{gap:.1%}",
        "searched": f"{found.search_s:.1f} s",
    }
    yield '<div class="figures">'
    for name, figure in figures.items():
        if figure is not None:
            yield f'<div class="figure"><b>{figure}</b>{name}</div>'
    yield "</div>"


def _picture(words: str, kind: str, content: bytes) -> str:
    data = b64encode(content).decode("ascii")
    return f'<img alt="{escape(words)}" src="data:{kind};base64,{data}">'


def _memory(planned: Planned) -> Iterator[str]:
    keys = (
        f'<span class="key" style="background:{colour}"></span>{part}'
        for part, colour in _COLOURS.items()
    )
    yield f'<p class="quiet">{"".join(keys)}</p>'
    yield '<div class="scroll"><table>'
    for bar in memory_bars(planned):
        parts = {part: size / bar.scale_bytes * 100 for part, size in bar.parts.items()}
        yield f"<tr><td>{escape(bar.name)}</td>"
        yield f'<td class="wide">{_bar(parts)}</td>'
        yield f"<td>{escape(bar.told)}</td></tr>"
    yield "</table></div>"


def _bar(percents: dict[str, float]) -> str:
    spans = (
        f'<span style="width:{percent:.2f}%;background:{_COLOURS[part]}"></span>'
        for part, percent in percents.items()
    )
    return f'<div class="bar">{"".join(spans)}</div>'


def _timeline(planned: Planned, png: bytes) -> Iterator[str]:
    shown, plan = shown_replicas(planned), planned.best.plan
    if len(shown) < len(plan.replicas):
        yield (
            f'<p class="quiet">{len(shown)} of {len(plan.replicas)} replicas, which '
            "stand for those that are like them.</p>"
        )
    yield _picture("What every device does when", "image/png", png)


def _answers(planned: Planned) -> Iterator[str]:
    """What was asked besides the plan, a table each."""
    if planned.baselines is not None:
        yield "<h2>Other planners, on the same simulator</h2>"
        yield from _baselines(planned)
    if planned.pareto:
        yield "<h2>Other wishes</h2>"
        yield from html_table(WISHES, wish_rows(planned))
    if planned.what_if:
        yield "<h2>Other clusters</h2>"
        yield '<p class="quiet">Without local search, the first row too.</p>'
        yield from html_table(CHANGES, change_rows(planned))


def _baselines(planned: Planned) -> Iterator[str]:
    """The table, with a bar for how long each planner's step is."""
    times_s = [
        0.0 if isinstance(judged, NoFeasiblePlan) else judged.simulation.step_time_s
        for _, judged, _ in planners(planned)
    ]
    longest_s = max(times_s)
    yield '<div class="scroll"><table>'
    head = (*BASELINES[:-1], "")
    yield f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"
    for row, time_s in zip(baseline_rows(planned), times_s, strict=True):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[:-1])
        bar = _bar({"static": time_s / longest_s * 100}) if time_s else ""
        yield f'<tr>{cells}<td class="wide">{bar}{escape(row[-1])}</td></tr>'
    yield "</table></div>"
