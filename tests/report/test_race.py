# SPDX-License-Identifier: Apache-2.0
"""A race as a viewer sees it: the clock, the lanes in order, the standings."""

import io
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.live import Live
from rich.text import Text

from hetjax.api.racing import race_planners
from hetjax.cluster.cluster import Cluster, Node
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.search.contest import ALONE, CONTESTANTS, EVEN, OURS, Judged
from hetjax.report.race.race import Race, RaceEntry
from hetjax.report.race.race_view import (
    LiveView,
    filled,
    racing,
    simulated_s,
    trained_tokens,
)
from tests.training.small import MODEL

SPEEDS = st.lists(st.floats(0.1, 1e9), min_size=1, max_size=9)
CLUSTER = Cluster(
    name="pair",
    nodes=(Node(name="a", device="L4", count=1), Node(name="b", device="H20", count=1)),
)


@given(speeds=SPEEDS, watched=st.floats(0, 20), takes=st.floats(0, 10))
def test_lanes_fill_in_proportion_and_the_best_is_full_at_the_end(
    speeds: list[float], watched: float, takes: float
):
    after_s = simulated_s(watched, takes)
    part = 1.0 if watched >= takes else watched / takes
    assert after_s == pytest.approx(3600 * part)
    for speed in speeds:
        share = filled(speed, max(speeds), after_s)
        assert share == pytest.approx(part * speed / max(speeds))
        assert 0 <= share <= 1
        assert trained_tokens(speed, after_s) == pytest.approx(speed * 3600 * part)
    assert filled(max(speeds), max(speeds), simulated_s(takes, takes)) == 1.0


def test_a_lane_without_a_plan_stays_empty():
    assert filled(0.0, 5.0, 3600.0) == filled(0.0, 0.0, 3600.0) == 0.0


class Screen:
    """A terminal with this many columns, and all that was written on it."""

    def __init__(self, width: int) -> None:
        self.file = io.StringIO()
        self.console = Console(
            file=self.file, width=width, force_terminal=True, highlight=False
        )


@pytest.fixture(scope="module")
def watched() -> tuple[Race, str]:
    """A race, and what its view wrote."""
    screen = Screen(80)
    with Live(console=screen.console, auto_refresh=False) as live:
        view = LiveView(live)
        race = race_planners(
            model=MODEL, cluster=CLUSTER, global_batch=4, seq_len=16, view=view
        )
        view.show(race, race_takes_s=0.2)
    return race, screen.file.getvalue()


def lines(shown: object, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(shown)
    return [line.rstrip() for line in console.export_text().splitlines()]


@pytest.mark.parametrize("width", [80, 120])
def test_lanes_keep_their_order_and_tell_the_tokens(
    watched: tuple[Race, str], width: int
):
    race, _ = watched
    names = tuple(CONTESTANTS)
    shown = lines(racing(race, names, 1800.0), width)
    assert max(map(len, shown)) <= width
    lanes = [line for line in shown if line.endswith("M tokens")]
    for name, lane in zip(names, lanes, strict=True):
        tokens = race.entry(name).tokens_per_s * 1800 / 1e6
        assert lane.startswith(f"{name} ") and f" {tokens:,.1f} M tokens" in lane
    lengths = {name: lane.count("━") for name, lane in zip(names, lanes, strict=True)}
    best = race.entries[0]
    for name in names:
        share = race.entry(name).tokens_per_s / best.tokens_per_s
        assert abs(lengths[name] - share * lengths[best.name]) <= 1


def test_the_last_picture_has_all_figures(watched: tuple[Race, str]):
    race, written = watched
    assert "M tokens" in written  # there was a race before
    shown = Text.from_ansi(written[written.rindex("vs even") :]).plain.splitlines()
    for entry, line in zip(race.entries, shown[1:], strict=False):
        name, speed, factor, devices, _ = race.row(entry)
        assert line.startswith(name)
        assert line.split()[-5:] == [speed, factor, *devices.split()]


def race_of(of: Race, **judged: Judged) -> Race:
    """Return a race with these results of the even split, one kind alone and hetjax."""
    entries = [
        RaceEntry(name=name, about="", judged=judged[key])
        for name, key in ((EVEN, "even"), (ALONE, "alone"), (OURS, "ours"))
    ]
    best_first = sorted(entries, key=lambda entry: -entry.tokens_per_s)
    return replace(of, entries=tuple(best_first))


def test_what_is_said_of_hetjax_follows_from_the_figures(watched: tuple[Race, str]):
    race, _ = watched
    fast, slow = race.entries[0], race.entries[-1]
    ratio = fast.tokens_per_s / slow.tokens_per_s
    assert ratio > 1.05
    for ours, other in ((fast, slow), (slow, fast)):
        shown = race_of(race, even=slow.judged, alone=other.judged, ours=ours.judged)
        first, *others = shown.sentences()
        assert first == (
            f"hetjax trains {ours.tokens_per_s:,.0f} tokens/s, "
            f"{ours.tokens_per_s / slow.tokens_per_s:.2f} times the even split, "
            f"{ours.tokens_per_s / other.tokens_per_s:.2f} times the fastest kind alone"
        )
        ahead = [told for told in others if "is ahead here" in told]
        if ours is fast:
            assert not ahead
        else:
            assert [told.startswith("fastest kind alone") for told in ahead] == [True]


def test_who_has_no_plan_is_said_to_have_none_and_why(watched: tuple[Race, str]):
    race, _ = watched
    small = NoFeasiblePlan(got="no plan: 9 GiB do not fit", allowed="8", fix="less")
    found = race.entries[0].judged
    shown = race_of(race, even=found, alone=small, ours=None)
    assert [shown.row(entry) for entry in shown.entries[1:]] == [
        ("fastest kind alone", "no plan", "", "", "9 GiB do not fit"),
        ("hetjax", "no plan", "", "", "no time was left"),
    ]
    assert shown.values()["planners"]["hetjax"]["tokens_per_s"] is None
    (first, _) = shown.sentences()
    assert first.startswith("even split is ahead here")
    assert "the plan of even split" in shown.draw().image("svg").decode()


def test_the_picture_has_the_figures_as_bars_and_marks_ours(watched: tuple[Race, str]):
    race, _ = watched
    picture = race.draw()
    assert "the plan of hetjax" in picture.image("svg").decode()
    upper = picture.figure.subfigs[0].axes[0]
    speeds = [entry.tokens_per_s for entry in race.entries]
    assert [bar.get_width() for bar in upper.patches] == pytest.approx(speeds)
    labels = upper.get_yticklabels()
    assert [label.get_text() for label in labels] == [e.name for e in race.entries]
    (marked,) = (x.get_text() for x in labels if x.get_fontweight() == "bold")
    assert marked == "hetjax"


def test_a_dollar_in_a_name_is_a_dollar(watched: tuple[Race, str]):
    race, _ = watched
    name = r"$\nosuch$"
    image = replace(race, cluster=replace(race.cluster, name=name)).draw().image("svg")
    assert name in image.decode()


def test_a_notebook_shows_the_same_table(watched: tuple[Race, str]):
    race, _ = watched
    cells = re.findall("<td[^>]*>(.*?)</td>", race._repr_html_())
    assert cells == [cell for entry in race.entries for cell in race.row(entry)]
