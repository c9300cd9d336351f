# SPDX-License-Identifier: Apache-2.0
"""The page of a run: complete, safe, and with the numbers of the run's files."""

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hetjax.report.html.curves import Curve, chart, marks, thinned
from hetjax.report.html.run_page import run_page
from hetjax.report.metrics import ms
from hetjax.report.prediction import predicted_spans
from hetjax.report.run_record import RunRecord
from hetjax.report.run_report import RunReport
from hetjax.schedule.certainty import certainty_of
from hetjax.schedule.predicted import Predicted
from tests.report.html_page import Page, assert_needs_nothing_else
from tests.report.test_plan_rows import cluster, predicted, two_stages

CLUSTER, PLAN = cluster(1.0), two_stages(4)
HOSTILE = "</script><script>alert(1)</script>"
WHEN = "2026-08-01T10:00:00+00:00"


def event(name: str, step: int, **details: Any) -> dict[str, Any]:
    return {"event": name, "step": step, "time": WHEN, **details}


RECOVERED = event(
    "recovered",
    7,
    reason=f"worker {HOSTILE} closed the connection",
    started=["east-0"],
    lost_steps=2,
    bytes={"memory": 3 * 2**20, "store": 2**19},
    tier_s={"memory": 0.5, "store": 1.0},
    seconds={"finish": 1.25, "compile": 2.5},
)
GOODPUT = {"productive_s": 6.0, "lost_s": 1.0, "recovering_s": 3.75}
GOODPUT |= {"data_s": 0.125, "compiling_s": 0.25, "evaluating_s": 0.25}
GOODPUT |= {"saving_s": 0.125}
EVENTS = [
    event("started", 0, plan="given"),
    RECOVERED,
    event("goodput", 10, goodput=0.5, **GOODPUT, replanning_s=0.0, other_s=0.5),
    event("finished", 10),
]


@pytest.fixture(scope="module")
def step() -> Predicted:
    return predicted(CLUSTER, PLAN)


def steps(number: int) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [{"step": 0, "val_loss": 7.25}]
    for n in range(1, number + 1):
        step_s = 0.5 + 0.01 * n
        lines.append(
            {
                "step": n,
                "loss": 7.0 - n / number,
                "step_time_s": step_s,
                "tokens_per_s": 64 / step_s,
                "mfu": 0.25,
            }
        )
    return [*lines, {"step": number, "val_loss": 5.5}]


def record(
    metrics: list[dict[str, Any]],
    events: list[dict[str, Any]],
    of: Predicted | None = None,
    *,
    is_simulated: bool = False,
) -> RunRecord:
    return RunRecord(
        run_dir=Path("runs/small"),
        settings={"steps": 10, "data.path": HOSTILE},
        cluster=CLUSTER,
        plan=PLAN,
        metrics=metrics,
        events=events,
        predicted=of,
        why_not_predicted="" if of else "device 'mine'",
        is_simulated=is_simulated,
        usd_per_hour=3.6,
    )


def test_the_page_has_the_numbers_of_the_files(step: Predicted):
    lines = steps(10)
    run = record(lines, EVENTS, step)
    html = run_page(run)
    assert_needs_nothing_else(html)
    page = Page(html)
    speeds = [line["tokens_per_s"] for line in lines if "loss" in line]
    times_s = [line["step_time_s"] for line in lines if "loss" in line]
    assert page.figures() == {
        "loss": "6.0000",
        "validation loss": "5.5000",
        "tokens/s, median": f"{median(speeds):,.0f}",
        "MFU, median": "25.0%",
        "goodput": "50.0%",
        "USD per million tokens": f"{3.6 / 3600 / median(speeds) * 1e6:.3g}",
        "step time, median": f"{ms(median(times_s))} ms",
        "predicted": f"{ms(step.simulation.step_time_s)} ms",
        "recoveries": "1",
    }
    assert {"Loss (nats per token)", "loss", "validation loss"} <= {*page.words}
    assert json.loads(json.dumps(RunReport(run).values()))["state"] == "finished"
    for device in step.memory:
        assert device in page.words


def test_steps_by_another_plan_are_not_held_against_the_plan_of_now(step: Predicted):
    changed = [*EVENTS[:2], event("replanned", 8, plan="east-0 is lost"), *EVENTS[2:]]
    lines = steps(10)
    run = record(lines, changed, step)
    page, later = Page(run_page(run)), lines[9:11]  # of steps 9 and 10
    assert [line["step"] for line in later] == [9, 10]
    step_s = median(line["step_time_s"] for line in later)
    speed = median(line["tokens_per_s"] for line in later)
    told = page.figures()
    assert told["step time, median"] == f"{ms(step_s)} ms"
    assert told["tokens/s, median"] == f"{speed:,.0f}"
    assert told["USD per million tokens"] == f"{3.6 / 3600 / speed * 1e6:.3g}"
    ratio = step_s / step.simulation.step_time_s
    assert f"measured is {ratio:.2f} times the predicted time" in page.words
    places = [path.attributes["d"] for path in page.all("path")]
    assert sum(place.count("L") == 9 for place in places) == 3  # curves have all steps
    (target,) = (p for p in page.all("path") if p.attributes["class"] == "target")
    assert float(target.attributes["d"][1:].split()[0]) == pytest.approx(800 / 9, 1e-3)
    at_once = record(lines, [*changed, event("replanned", 10, plan="again")], step)
    assert "step time, median" not in Page(run_page(at_once)).figures()


def test_a_recovery_is_told_with_its_seconds_and_bytes():
    page = Page(run_page(record(steps(10), EVENTS)))
    row = page.words[page.words.index("moved") + 1 :][:7]
    assert row == [
        "7",
        "2026-08-01 10:00:00",
        RECOVERED["reason"],
        "3.8 s",
        "compile 2.5 s",
        "2 steps",
        "3.0 MiB from memory, 0.5 MiB from store",
    ]
    for part, seconds in GOODPUT.items():
        at = page.words.index(part.removesuffix("_s"))
        assert page.words[at + 1] == f"{seconds:,.1f} s"


def test_a_run_that_has_done_nothing_yet_has_a_page():
    run = record([], [event("started", 0, plan="given")])
    html = run_page(run)
    assert_needs_nothing_else(html)
    page = Page(html)
    assert "No step is recorded yet." in page.words
    assert any("device 'mine'" in word for word in page.words)
    assert page.figures() == {}
    assert not page.all("path") and not page.all("rect")
    assert "no step is recorded yet" in str(RunReport(run))
    assert any("running, or" in word for word in page.words)


def test_times_of_simulated_devices_are_not_held_against_the_prediction(
    step: Predicted,
):
    run = record(steps(5), EVENTS, step, is_simulated=True)
    page = Page(run_page(run))
    assert "predicted for the devices" in page.figures()
    assert any("on the CPU here" in word for word in page.words)
    assert "USD per million tokens" not in page.figures()
    assert "target" not in {path.attributes["class"] for path in page.all("path")}


def test_steps_that_were_traced_are_drawn_beside_the_prediction(step: Predicted):
    spans = [span for span in predicted_spans(step) if not span.lane]
    other = replace(spans[0], node="gone-0")  # of the previous plan
    html = run_page(replace(record(steps(3), EVENTS), traced=[*spans, other]))
    page = Page(html)
    assert "Steps as measured" in page.words
    bars = [rect for rect in page.all("rect") if "g" in rect.parents]
    drawn = [rect for rect in bars if rect.attributes.get("class") != "rest"]
    assert len(drawn) == len(spans)
    assert_needs_nothing_else(html)
    assert "Steps as measured" not in run_page(record(steps(3), EVENTS))


def test_what_users_wrote_is_text():
    html = run_page(record(steps(3), EVENTS))
    assert HOSTILE not in html
    page = Page(html)
    assert len(page.all("script")) == 1
    assert HOSTILE in page.words  # the setting
    assert any(RECOVERED["reason"] in word for word in page.words)


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([event("started", 0)], "running, or ended without a record"),
        ([event("preempted", 3, reason="SIGTERM")], "stopped by SIGTERM"),
        (
            [event("preempted", 3, reason="SIGTERM"), event("restored", 3)],
            "running, or ended without a record",
        ),
        ([event("restored", 3), event("finished", 9)], "finished"),
    ],
)
def test_the_state_is_that_of_the_last_start(events: list, state: str):
    assert record([], events).state == state


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
@example([5e-324])
@example([1e6, math.nextafter(1e6, 2e6)])
def test_marks_hold_all_values_between_them(values: list[float]):
    found = marks(min(values), max(values))
    slack = 1e-6 * (found[-1] - found[0])
    assert found[0] <= min(values) + slack and max(values) - slack <= found[-1]
    gaps = [b - a for a, b in zip(found, found[1:], strict=False)]
    assert min(gaps) == pytest.approx(max(gaps), rel=1e-6)
    assert 2 <= len(found) <= 8


def test_the_speed_of_a_cpu_that_nobody_measured_is_not_held_against_it(
    step: Predicted,
):
    (east, west) = CLUSTER.nodes
    guessed = replace(east, device="cpu", peak_tflops=None)
    estimated = replace(step, times_from="estimated from the device catalogue")
    sure = certainty_of(step, CLUSTER, lambda there: predicted(there, PLAN).costs)
    of = replace(record(steps(5), EVENTS, estimated), certainty=sure)
    assert any(word.startswith("how sure: ") for word in Page(run_page(of)).words)
    of = replace(of, cluster=replace(CLUSTER, nodes=(guessed, west)))
    page = Page(run_page(of))
    assert not any("how sure: " in word for word in page.words)
    assert any("how sure is memory: " in word for word in page.words)
    assert any("cannot know how fast this CPU is" in word for word in page.words)
    assert not any("times the predicted time" in word for word in page.words)
    assert "target" not in {path.attributes["class"] for path in page.all("path")}
    given = replace(of.cluster, nodes=(replace(guessed, peak_tflops=1.0), west))
    measured = replace(step, times_from="measured, p.json, float32")
    for known in (replace(of, cluster=given), replace(of, predicted=measured)):
        words = Page(run_page(known)).words
        assert any("times the predicted time" in word for word in words)


def test_a_single_point_is_a_dot_that_can_be_seen(step: Predicted):
    page = Page(run_page(record(steps(1), EVENTS, step)))
    curves = [p for p in page.all("path") if p.attributes["class"].startswith("first")]
    assert [p.attributes["class"] for p in curves] == 3 * ["first dot"]
    page = Page(run_page(record(steps(2), EVENTS, step)))
    assert "first" in {path.attributes["class"] for path in page.all("path")}


def test_curves_pass_through_their_points_and_long_ones_are_thinned_by_means():
    points = [(n, float(n % 2)) for n in range(10)]
    (line,) = chart("a", [Curve(name="a", look="first", points=points)]).lines
    assert line.path.count("L") == 9 and not line.band
    many = [(n, float(n % 7)) for n in range(7_000)]
    means, ranges = thinned(many)
    assert len(means) <= 600
    assert sum(y for _, y in means) / len(means) == pytest.approx(3.0, abs=0.01)
    assert all(low[1] == 0.0 and high[1] == 6.0 for low, high in ranges[:-1])
    (line,) = chart("a", [Curve(name="a", look="first", points=many)]).lines
    assert line.band.endswith("Z")


def test_who_was_slow_at_the_end_is_told_in_the_report(step: Predicted):
    def slow(name: str, at: int, who: str, factor: Any) -> dict[str, Any]:
        figures = {"what": "node", "factor": factor, "since": at - 6}
        return event(name, at, who=who, **figures, evidence="others as before")

    events = [
        event("started", 0, plan="given"),
        slow("slow", 3, "east-0", 1.9),
        slow("slow", 4, HOSTILE, 1.5),
        slow("slow", 5, "west-0", 2.0),
        slow("as_before", 8, "west-0", 2.0),
        slow("slow", 9, "odd-0", "much"),  # who edited the file?
    ]
    found = record(steps(10), events, step)
    assert found.slow[0] == "slow: east-0 1.9x since step -3, others as before"
    assert [HOSTILE in line for line in found.slow] == [False, True, False]
    assert "odd-0 since step 3" in found.slow[2] and len(found.slow) == 3
    assert found.slow[0] in str(RunReport(found))
    html = run_page(found)
    assert found.slow[0] in html and HOSTILE not in html
    again = [*events, event("restored", 10)]  # a start resets it
    assert not record(steps(10), again, step).slow
