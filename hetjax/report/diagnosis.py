# SPDX-License-Identifier: Apache-2.0
"""Shows what `doctor` found: a table for people, one JSON object for machines.

Owns the class of a finding, and how findings look. Does not own any check
(`hetjax/diagnosis/`).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hetjax.errors import counted_noun
from hetjax.plans.table import html_table

Level = Literal["ok", "warning", "problem"]
_STYLES: dict[Level, str] = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_WIDTH = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one check: `found` is for people.

    `fix` is what to type or change; it is empty if all is well.
    """

    check: str
    level: Level
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings; `print(diagnosis)` shows a table.

    >>> print(Diagnosis((Finding(check="ports", level="ok", found="6379 is free"),)))
    ok  ports  6379 is free
    <BLANKLINE>
    no problem found
    """

    findings: tuple[Finding, ...]

    @property
    def problems(self) -> int:
        """The number of findings that must be fixed before a run can do well."""
        return sum(finding.level == "problem" for finding in self.findings)

    def json(self) -> str:
        """Return one JSON object with the list of findings."""
        findings = [asdict(finding) for finding in self.findings]
        return json.dumps({"problems": self.problems, "findings": findings}, indent=2)

    def show(self, console: Console) -> None:
        """Print the table, in colour if the console has it."""
        console.print(_table(self.findings))
        console.print()
        console.print(_summary(self.findings), highlight=False)

    def _repr_html_(self) -> str:
        rows = [(f.level, f.check, f.found, f.fix) for f in self.findings]
        header = ("", "check", "found", "fix")
        return html_table(header, rows, notes=(_summary(self.findings),))

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=_WIDTH, color_system=None)
        self.show(console)
        lines = console.file.getvalue().splitlines()  # pyright: ignore
        return "\n".join(line.rstrip() for line in lines)


def _table(findings: Sequence[Finding]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for is_wrapped in (False, False, True):
        table.add_column(no_wrap=not is_wrapped, overflow="fold")
    for finding in findings:
        text = Text(finding.found)
        if finding.fix:
            text.append(f"\nfix: {finding.fix}", style="bold")
        level = Text(finding.level, style=_STYLES[finding.level])
        table.add_row(level, Text(finding.check), text)
    return table


def _summary(findings: Sequence[Finding]) -> str:
    problems, warnings = (
        sum(finding.level == level for finding in findings)
        for level in ("problem", "warning")
    )
    counted = counted_noun(problems, "problem") if problems else "no problem"
    more = f", {counted_noun(warnings, 'warning')}" if warnings else ""
    return f"{counted} found{more}"
