# SPDX-License-Identifier: Apache-2.0
"""Defines the report of a run: a page, a few lines, or numbers.

Owns the lines. Does not own the numbers (`run_record.py`) nor the page
(`html/run_page.py`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetjax.files.writing import write_whole
from hetjax.report.html.pages import framed
from hetjax.report.html.run_page import run_page
from hetjax.report.metrics import HEADLINES, ms, spelled
from hetjax.report.run_record import RunRecord

_IN_A_LINE = tuple(metric for metric in HEADLINES if metric.key != "step_time_s")


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run directory says: `report.save("report.html")`, `print(report)`.

    A notebook shows it as a page.
    """

    record: RunRecord

    def values(self) -> dict[str, Any]:
        """Return the headline numbers by name; None for unknown ones."""
        return self.record.values()

    def save(self, path: str | Path) -> None:
        """Write the page as one file that needs no other."""
        write_whole(Path(path), run_page(self.record))

    def __str__(self) -> str:
        values = self.values()
        reached = f"step {values['step']} of {values['steps']}, {values['state']}"
        lines = [f"{self.record.run_dir}: {reached}"]
        shown = [*spelled(_IN_A_LINE, values)]
        if values["goodput"] is not None:
            shown.append(f"goodput {values['goodput']:.2f}")
        lines += ["  ".join(shown)] if shown else ["no step is recorded yet"]
        if values["step_time_s"] is not None:
            predicted_s = values["predicted_step_time_s"]
            beside = "" if predicted_s is None else f", {ms(predicted_s)} ms predicted"
            lines.append(f"step time {ms(values['step_time_s'])} ms{beside}")
            lines += self.record.how_sure
        return "\n".join([*lines, *self.record.slow, *self.record.moves])

    def _repr_html_(self) -> str:
        """Return the page."""
        return framed(run_page(self.record))
