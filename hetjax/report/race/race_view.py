# SPDX-License-Identifier: Apache-2.0
"""Shows a race of planners as it runs: lanes on a terminal, or plain lines.

Owns what is shown while planners plan, the clock that runs through an hour of training
in seconds, the lanes that fill with it, and the standings. Does not own the figures
(`race.py`).
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from hetjax.report.progress import is_live

if TYPE_CHECKING:  # the view starts before imports that take seconds
    from hetjax.report.race.race import Race, RaceEntry

RACE_S = 3600.0  # simulated seconds from the start of a race to its end
_FRAMES_PER_S = 20
_OURS, _OTHERS = "green", "cyan"  # colours that dark and light terminals have


class RaceView(Protocol):
    """What a race reports to its viewers."""

    def line_up(self, names: Sequence[str]) -> None:
        """Receive the names of the participants."""

    def begins(self, name: str) -> None:
        """Note that a planner has begun."""

    def planned(self, entry: "RaceEntry") -> None:
        """Receive what a planner found."""


class PlainView:
    """Shows plain lines: the current planner on standard error, then the result."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet

    def line_up(self, names: Sequence[str]) -> None: ...

    def begins(self, name: str) -> None:
        if not self._quiet:
            print(f"planning: {name}", file=sys.stderr, flush=True)

    def planned(self, entry: "RaceEntry") -> None: ...

    def show(self, race: "Race", race_takes_s: float) -> None:
        """Print the result at once; `race_takes_s` only matters to a live view."""
        print(race)


QUIET = PlainView(quiet=True)


class LiveView:
    """A lane for each planner: what it does, its progress, its result."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._lanes: dict[str, RenderableType] = {}

    def line_up(self, names: Sequence[str]) -> None:
        self._lanes = dict.fromkeys(names, Text("waits", style="dim"))
        self._live.update(planning(self._lanes))

    def begins(self, name: str) -> None:
        self._lanes[name] = Spinner("dots", "planning")
        self._live.update(planning(self._lanes))

    def planned(self, entry: "RaceEntry") -> None:
        words = f"has a plan for {entry.num_devices} devices"
        if entry.plan is None:
            words = "has no plan"
        self._lanes[entry.name] = Text(words)
        self._live.update(planning(self._lanes))

    def show(self, race: "Race", race_takes_s: float) -> None:
        """Let the lanes fill for so many seconds, then show the standings."""
        names, begin_s = tuple(self._lanes), time.monotonic()
        while (watched_s := time.monotonic() - begin_s) < race_takes_s:
            after_s = simulated_s(watched_s, race_takes_s)
            self._live.update(racing(race, names, after_s), refresh=True)
            time.sleep(1 / _FRAMES_PER_S)
        self._live.update(standings(race), refresh=True)


@contextmanager
def race_view(title: str, *, quiet: bool = False) -> Iterator[PlainView | LiveView]:
    """Open the view that suits standard output; a quiet one only prints the result."""
    console = Console(highlight=False)
    if quiet or not is_live(console):
        yield PlainView(quiet=quiet)
        return
    console.print(title, markup=False)
    starting = Spinner("dots", "starting")
    with Live(starting, console=console, refresh_per_second=_FRAMES_PER_S / 2) as live:
        yield LiveView(live)


def planning(lanes: Mapping[str, RenderableType]) -> RenderableType:
    """Return a line on each planner while plans are being found."""
    table = Table.grid(padding=(0, 2))
    for name, words in lanes.items():
        table.add_row(name, words)
    return Group("", table, "", Text("finding the plans that race", style="dim"))


def racing(race: "Race", names: Sequence[str], after_s: float) -> RenderableType:
    """Return the lanes after so many simulated seconds, in the order of the names."""
    table = _grid()
    for name in names:
        tokens = trained_tokens(race.entry(name).tokens_per_s, after_s) / 1e6
        bar = _bar(race, name, after_s)
        table.add_row(_named(race, name), bar, f"{tokens:,.1f} M tokens")
    clock = timedelta(seconds=int(after_s))
    return Group("", table, "", Text(f"training for {clock}, simulated", style="dim"))


def standings(race: "Race") -> RenderableType:
    """Return the results, best first, and what follows from them."""
    table = _grid(num_figures=3)
    heads = (Text(name, style="dim") for name in race.header[1:4])
    table.add_row("", "", *heads)
    for entry in race.entries:
        _, *figures, _ = race.row(entry)
        bar = _bar(race, entry.name, RACE_S)
        table.add_row(_named(race, entry.name), bar, *figures)
    return Group("", table, "", *race.sentences())


def _grid(num_figures: int = 1) -> Table:
    """Return a table of a name, a bar that takes the free room, then figures."""
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for _ in range(num_figures):
        table.add_column(no_wrap=True, justify="right")
    return table


def _named(race: "Race", name: str) -> Text:
    return Text(name, style=f"bold {_OURS}" if name == race.ours.name else "")


def _bar(race: "Race", name: str, after_s: float) -> ProgressBar:
    share = filled(race.entry(name).tokens_per_s, race.best_per_s, after_s)
    colour = _OURS if name == race.ours.name else _OTHERS
    return ProgressBar(
        1.0, share, style="dim", complete_style=colour, finished_style=colour
    )


def simulated_s(watched_s: float, race_takes_s: float) -> float:
    """Return the simulated seconds after so many seconds of watching.

    >>> simulated_s(2.0, race_takes_s=8.0)
    900.0
    """
    if watched_s >= race_takes_s:
        return RACE_S
    return RACE_S * watched_s / race_takes_s


def trained_tokens(tokens_per_s: float, after_s: float) -> float:
    """Return the tokens of a lane after so many simulated seconds."""
    return tokens_per_s * after_s


def filled(tokens_per_s: float, best_per_s: float, after_s: float) -> float:
    """Return how full a lane is, from 0 to 1: what the fastest has at the end is 1.

    >>> filled(50.0, best_per_s=200.0, after_s=1800.0)
    0.125
    """
    if best_per_s == 0:  # no planner has a plan
        return 0.0
    return trained_tokens(tokens_per_s, after_s) / trained_tokens(best_per_s, RACE_S)
