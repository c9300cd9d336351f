# SPDX-License-Identifier: Apache-2.0
"""Keeps the rows that a part of a session measures, on disk as soon as they are known.

A part's file has one JSON object per line: `begun`, a line per row, `ended`. A killed
process loses at most the line that it was writing. Does not own what is measured
(`parts/`) nor how it is shown (`page.py`).
"""

import json
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

State = Literal["done", "failed", "out of time", "skipped", "stopped", "not begun"]
_LONGEST = 2_000  # characters of a reason
# all but the last name of an absolute path; matches no relative path and no URL
_FOLDERS = re.compile(r"(?<![\w.~/:])/(?:[\w.+-]+/)+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One figure: a number in `unit`, a yes or no, or a word, beside hetjax's
    prediction. `what` names the same quantity on every card."""

    what: str
    measured: float | bool | str | None
    unit: str = ""
    predicted: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted, where both are known."""
        if not self.predicted or isinstance(self.measured, bool | str | None):
            return None
        return self.measured / self.predicted


@dataclass(frozen=True, kw_only=True, slots=True)
class PartResult:
    """What is known of a part: its rows, and how it ended."""

    name: str
    state: State
    rows: Sequence[Row] = ()
    why: str = ""
    took_s: float | None = None


class PartFile:
    """The file of a part in a session's directory."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name, self.path = name, directory / "parts" / f"{name}.jsonl"

    def begin(self, limit_s: float) -> None:
        """Start the file anew; discard what an earlier try left."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        self._append({"begun": self.name, "limit_s": limit_s})

    def add(self, row: Row) -> None:
        """Write a row through to the disk, not only into the file system's cache."""
        self._append({"row": asdict(row) | {"note": without_names(row.note)}})

    def end(self, state: State, took_s: float, why: str = "") -> None:
        """Record how the part ended. The first record counts: the part's own."""
        ending = {"ended": state, "took_s": took_s, "why": without_names(why)}
        self._append(ending)

    def read(self) -> PartResult:
        """Return what is on disk, without a half line that a kill left."""
        lines = [*_objects(self.path)]
        rows = tuple(Row(**line["row"]) for line in lines if "row" in line)
        if not lines:
            return PartResult(name=self.name, state="not begun")
        end = next((line for line in lines if "ended" in line), None)
        if end is None:
            why = "its session was killed before the part ended"
            return PartResult(name=self.name, state="stopped", rows=rows, why=why)
        return PartResult(
            name=self.name,
            state=end["ended"],
            rows=rows,
            why=end["why"],
            took_s=end["took_s"],
        )

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _objects(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def without_names(text: str) -> str:
    """Return the end of a text without names of this machine, because results are sent
    to others."""
    names = {str(Path.cwd()): ".", str(Path.home()): "~", socket.gethostname(): "HOST"}
    for name, instead in names.items():
        if len(name) > 2:
            text = text.replace(name, instead)
    return _FOLDERS.sub("", text).strip()[-_LONGEST:]
