# SPDX-License-Identifier: Apache-2.0
"""A race as somebody watches it: the clock, the lanes in their order, the standings."""

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
from hetjax.planner.search.contest import CONTESTANTS
from hetjax.report.race import Race
from hetjax.report.race_view import (
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
    """A terminal of so many columns, and all that was written on it."""

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


def test_a_dollar_in_a_name_is_a_dollar(watched: tuple[Race, str]):
    race, _ = watched
    name = r"$\nosuch$"
    image = replace(race, cluster=replace(race.cluster, name=name)).draw().image("svg")
    assert name in image.decode()


def test_a_notebook_shows_the_same_table(watched: tuple[Race, str]):
    race, _ = watched
    cells = re.findall("<td[^>]*>(.*?)</td>", race._repr_html_())
    assert cells == [cell for entry in race.entries for cell in race.row(entry)]
