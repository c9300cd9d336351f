# SPDX-License-Identifier: Apache-2.0
"""The page of a plan: complete without a network, safe, and true to the result."""

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from hetjax.errors import NoFeasiblePlan
from hetjax.plans.plan import Plan
from hetjax.report.found import FoundPlan
from hetjax.report.html import timeline_view
from hetjax.report.html.plan_page import plan_page
from hetjax.report.metrics import ms
from hetjax.report.prediction import predicted_spans
from hetjax.report.timeline_bars import Bar, grouped
from hetjax.schedule.predicted import Predicted
from hetjax.schedule.programs.action import Op
from hetjax.schedule.simulation.trace import Span
from tests.report.html_page import Page, assert_needs_nothing_else
from tests.report.test_plan_rows import cluster, planned, predicted, two_stages

HOSTILE = '<script>alert("1")</script>'


def spans_of_lanes(of: Predicted) -> list[Span]:
    """Return the drawn spans: a lane's devices are alike, so its first suffices."""
    firsts = {(node, devices[0]) for node, devices in of.simulation.lanes}
    return [span for span in predicted_spans(of) if (span.node, span.device) in firsts]


def bars(page: Page) -> list[dict[str, str]]:
    """Return the bars that stand for spans, not those for the rest of a span."""
    return [
        dict(element.attributes)
        for element in page.all("rect")
        if "g" in element.parents and element.attributes.get("class") != "rest"
    ]


def test_the_page_has_the_figures_of_the_result_and_needs_nothing_else(
    tmp_path: Path,
):
    told = planned(cluster(1e6), two_stages(4))
    none = NoFeasiblePlan(got="no room: none", allowed="room", fix="more of it")
    others = {"varuna": told.best, "hapt": none}
    second = predicted(cluster(1e6), two_stages(8))
    told = replace(told, baselines=others, second=second)
    found = FoundPlan(told)
    found.write_report(tmp_path / "p.html", "what made it")
    html = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert_needs_nothing_else(html)
    page, values = Page(html), found.values()
    figures = page.figures()
    assert figures["step time"] == f"{ms(values['step_time_s'])} ms"
    assert figures["tokens/s"] == f"{values['tokens_per_s']:,.0f}"
    assert figures["bubble"] == f"{values['bubble_share']:.1%}"
    assert figures["devices"] == "2 of 3"
    assert {"varuna", "hapt", "no plan", "no room", "what made it"} <= {*page.words}
    at = page.words.index("hetjax, second")
    slower = second.simulation.step_time_s / values["step_time_s"]
    assert page.words[at + 1 : at + 3] == [
        ms(second.simulation.step_time_s),
        f"{slower:.2f}x as fast",
    ]
    assert any("not worth using" in word for word in page.words) == bool(told.idle)
    sure = [word for word in str(found).splitlines() if word.startswith("how sure")]
    assert len(sure) >= 1 and {*sure} <= {*page.words}


def test_every_device_has_a_row_and_every_span_is_drawn_once():
    told = planned(cluster(1.0), two_stages(5))
    page, spans = Page(plan_page(told)), spans_of_lanes(told.best)
    for device in told.best.memory:
        assert page.words.count(device) >= 2, device  # in the timeline, and in memory
    drawn = bars(page)
    assert len(drawn) == len(spans)
    assert not any("data-n" in bar for bar in drawn)
    starts = sorted(float(bar["x"]) for bar in drawn)
    assert starts == pytest.approx(sorted(1e3 * span.start_s for span in spans))
    of_last = [s for s in spans if s.action.op is Op.FB]
    times = sorted(bar["data-s"] for bar in drawn if "data-s" in bar)
    assert len(times) == len(of_last) == 5
    widths = sum(float(bar["width"]) for bar in drawn if "data-s" not in bar)
    widths += sum(float(time.split()[1]) for time in times)
    assert widths == pytest.approx(1e3 * sum(s.end_s - s.start_s for s in spans), 1e-4)


def test_a_step_of_many_passes_shares_bars_and_says_how_many(
    monkeypatch: pytest.MonkeyPatch,
):
    told = planned(cluster(1e3), two_stages(60))
    num_spans = len(spans_of_lanes(told.best))
    monkeypatch.setattr(timeline_view, "_MOST_BARS", 150)
    monkeypatch.setattr(timeline_view, "_SLICES", (200, 50, 20))
    html = plan_page(told)
    page = Page(html)
    drawn = bars(page)
    assert len(drawn) <= 150 < num_spans
    assert sum(int(bar.get("data-n", "1")) for bar in drawn) == num_spans
    said = f"{num_spans:,} passes and transfers are drawn as {len(drawn):,} bars"
    assert any(said in word for word in page.words)


@pytest.mark.parametrize("slice_ms", [0.5, 3e3, 1e4])
def test_shared_bars_keep_how_full_each_kind_of_work_is(slice_ms: float):
    spans = predicted_spans(predicted(cluster(1e3), two_stages(8)))
    alone = [
        Bar(
            kind=str(span.action.op),
            span=span,
            number=1,
            shade=0.0,
            start_ms=1e3 * span.start_s,
            end_ms=1e3 * span.end_s,
            top=float(place),
            height=1.0,
        )
        for place, lane in enumerate({(s.node, s.lane) for s in spans})
        for span in spans
        if (span.node, span.lane) == lane
    ]
    shared = grouped(alone, slice_ms)
    for kind in {bar.kind for bar in alone}:
        before = sum(bar.width_ms for bar in alone if bar.kind == kind)
        after = sum(bar.width_ms for bar in shared if bar.kind == kind)
        assert after == pytest.approx(before)
    assert sum(bar.num_spans for bar in shared) == len(alone)
    ends: dict[float, float] = {}
    for bar in sorted(shared, key=lambda bar: (bar.top, bar.start_ms)):
        assert bar.start_ms >= ends.get(bar.top, -inf) - 1e-9  # no bar covers another
        ends[bar.top] = bar.end_ms


def test_names_are_text_whatever_is_in_them():
    plan: Plan = replace(two_stages(2), model=HOSTILE)
    of = cluster(1.0)
    nodes = tuple(replace(node, zone=HOSTILE) for node in of.nodes)
    told = planned(of, two_stages(2))
    best = replace(told.best, plan=plan, times_from=HOSTILE)
    request = replace(
        told.request, cluster=replace(of, name=f'"{HOSTILE}', nodes=nodes)
    )
    found = replace(told.found, best=best, request=request)
    told = replace(told, found=found, request=request)
    html = plan_page(told, HOSTILE)
    page = Page(html)
    assert len(page.all("script")) == 1
    assert HOSTILE not in html
    assert sum(HOSTILE in word for word in page.words) >= 4
    (frame,) = Page(FoundPlan(told)._repr_html_()).all("iframe")
    assert Page(frame.attributes["srcdoc"]).words[1:] == [
        word for word in Page(plan_page(told)).words[1:]
    ]
