# SPDX-License-Identifier: Apache-2.0
"""Defines the result of a race of planners: simulated tokens per second of each.

Owns the order, and what is said and written of the result. Does not own the
participants (`planner/search/contest.py`), the live view and its clock (`race_view.py`)
nor the drawing (`pictures/race_picture.py`).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Cluster
from hetjax.errors import NoFeasiblePlan
from hetjax.files.parsing import json_value
from hetjax.planner.search.contest import ALONE, EVEN, OURS, Judged
from hetjax.plans.plan import Plan
from hetjax.plans.plan_files import plan_json, write_plan
from hetjax.plans.table import aligned, html_table
from hetjax.report.pictures.picture import Picture
from hetjax.report.pictures.race_picture import SpeedBar, race_picture
from hetjax.report.plans.plan_rows import num_devices
from hetjax.report.prediction import SimulatedStep
from hetjax.schedule.predicted import Predicted


@dataclass(frozen=True, kw_only=True, slots=True)
class RaceEntry:
    """A planner in the race: its name, what it is, and its plan as simulated.

    `judged` is NoFeasiblePlan if it found none that fits, None if it found none in
    time.
    """

    name: str
    about: str
    judged: Judged

    @property
    def step(self) -> SimulatedStep | None:
        """A simulated step of its plan."""
        judged = self.judged
        return SimulatedStep(judged) if isinstance(judged, Predicted) else None

    @property
    def plan(self) -> Plan | None:
        return None if self.step is None else self.step.plan

    @property
    def tokens_per_s(self) -> float:
        """The tokens per second of its plan; 0 without a plan."""
        return 0.0 if self.step is None else self.step.tokens_per_s

    @property
    def num_devices(self) -> int:
        """The number of devices that its plan uses; 0 without a plan."""
        return 0 if self.plan is None else num_devices(self.plan)

    @property
    def file_name(self) -> str:
        """The file name of its plan in a folder: letters, digits and hyphens."""
        letters = (letter if letter.isalnum() else "-" for letter in self.name.lower())
        return f"{''.join(letters)}.json"


@dataclass(frozen=True, kw_only=True)
class Race:
    """The plans of several planners for one model on one cluster, best first.

    `print(race)`, `race.draw()`, `race.entries`.
    """

    cluster: Cluster
    entries: tuple[RaceEntry, ...]

    @property
    def best_per_s(self) -> float:
        """Tokens per second of the fastest; 0 if no planner has a plan."""
        return max(entry.tokens_per_s for entry in self.entries)

    def entry(self, name: str) -> RaceEntry:
        """Return the entry of that name."""
        return next(entry for entry in self.entries if entry.name == name)

    @property
    def ours(self) -> RaceEntry:
        return self.entry(OURS)

    @property
    def header(self) -> tuple[str, ...]:
        """The header of the cells of `row`."""
        return "planner", "tokens/s", "vs even", "devices", ""

    def factor(self, entry: RaceEntry) -> float | None:
        """Return the speed relative to the even split; None if either has no plan."""
        even = self.entry(EVEN).tokens_per_s
        return entry.tokens_per_s / even if even and entry.tokens_per_s else None

    def values(self) -> dict[str, Any]:
        """Return all numbers under the names that `demo --json` gives them."""
        return {
            "cluster": self.cluster.name,
            "num_devices": self.cluster.num_devices,
            "planners": {entry.name: self._values(entry) for entry in self.entries},
        }

    def draw(self) -> Picture:
        """Draw tokens per second, and the layout of hetjax's plan.

        Raises BadInput without matplotlib.
        """
        shown = self.ours if self.ours.plan else self.entries[0]
        assert shown.plan is not None  # there is no race without one
        plan, cluster = shown.plan, self.cluster
        bars = [self._bar(entry) for entry in self.entries]
        title = (
            f"{plan.model} on {cluster.num_devices} devices of {cluster.name}: "
            "simulated tokens/s, times the even split, devices in use"
        )
        return race_picture(bars, title, plan, cluster, f"the plan of {shown.name}")

    def write_plans(self, folder: str | Path) -> None:
        """Write the plan of each entry that has one into a folder; make the folder."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for entry in self.entries:
            if entry.plan is not None:
                write_plan(Path(folder) / entry.file_name, entry.plan)

    def row(self, entry: RaceEntry) -> tuple[str, ...]:
        """Return the cells of an entry under the `header`."""
        if entry.plan is None:
            return entry.name, "no plan", "", "", self.about(entry)
        factor = self.factor(entry)
        return (
            entry.name,
            f"{entry.tokens_per_s:,.0f}",
            "" if factor is None else f"{factor:.2f}x",
            f"{entry.num_devices} of {self.cluster.num_devices}",
            self.about(entry),
        )

    def about(self, entry: RaceEntry) -> str:
        """Return what a planner is, or why it has no plan; for `ALONE`, which kind."""
        if isinstance(entry.judged, NoFeasiblePlan):
            return entry.judged.got.rpartition(": ")[2]
        if entry.plan is None:
            return "no time was left"
        if entry.name == ALONE:
            return f"{_kinds(entry.plan, self.cluster)}, by hetjax"
        return entry.about

    def sentences(self) -> Iterator[str]:
        """Yield what follows from the figures, and what they rest on."""
        best, ours = self.entries[0], self.ours
        if ours.tokens_per_s:
            yield ", ".join(self._against(ours))
        if best.tokens_per_s > ours.tokens_per_s:
            yield (
                f"{best.name} is ahead here: `hetjax plan` continues its search from "
                "such a plan, but in this race it may not"
            )
        yield (
            "simulated with the figures of the device catalogue; planners from papers "
            "as implemented in this library"
        )

    def __str__(self) -> str:
        rows = [self.row(entry) for entry in self.entries]
        return "\n".join([*aligned(self.header, rows), "", *self.sentences()])

    def _repr_html_(self) -> str:
        rows = [self.row(entry) for entry in self.entries]
        return html_table(self.header, rows, notes=tuple(self.sentences()))

    def _against(self, ours: RaceEntry) -> Iterator[str]:
        """Yield our speed and our factors, a few words each."""
        yield f"{ours.name} trains {ours.tokens_per_s:,.0f} tokens/s"
        for name in (EVEN, ALONE):
            other = self.entry(name).tokens_per_s
            if other:
                yield f"{ours.tokens_per_s / other:.2f} times the {name}"

    def _bar(self, entry: RaceEntry) -> SpeedBar:
        _, speed, factor, devices, _ = self.row(entry)
        words = [f"{speed} tokens/s" if entry.plan else speed, factor, devices]
        return SpeedBar(
            name=entry.name,
            tokens_per_s=entry.tokens_per_s,
            words=", ".join(filter(None, words)),
            is_ours=entry.name == OURS,
        )

    def _values(self, entry: RaceEntry) -> dict[str, Any]:
        about = {"about": self.about(entry)}
        if entry.plan is None:
            return {"tokens_per_s": None, **about}
        assert entry.plan.predicted is not None
        return {
            "tokens_per_s": entry.tokens_per_s,
            "step_time_s": entry.plan.predicted.step_time_s,
            "times_even": self.factor(entry),
            "num_devices": entry.num_devices,
            **about,
            "plan": json_value(plan_json(entry.plan), finite=False),
        }


def _kinds(plan: Plan, cluster: Cluster) -> str:
    """Return the devices in use, by kind."""
    nodes = (cluster.node(name) for name, _ in plan.used_devices())
    kinds = Counter(canonical_name(node.device) for node in nodes)
    return " + ".join(f"{count} x {kind}" for kind, count in kinds.items())
