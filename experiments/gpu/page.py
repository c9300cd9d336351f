# SPDX-License-Identifier: Apache-2.0
"""Writes the page of a session: predictions, measurements, and verdicts on claims.

Owns the Markdown. Does not own the figures (`rows.py`) nor the claims (`claims.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.gpu.claims import CLAIMS, Claim
from experiments.gpu.parts import PARTS
from experiments.gpu.rows import PartResult, Row

_LONGEST_REASON = 300  # characters, of a part that failed; its file has more


def page(session: Mapping[str, Any], parts: Sequence[PartResult]) -> str:
    """Return the page as Markdown."""
    lines = [
        f"# A session on {session['card'] or 'a device that gave no name'}",
        "",
        f"{session['date']}; `{session['command']}`; {session['machine']}",
        f"Driver: {session['driver'] or 'none of NVIDIA'}",
        "",
        *_table(
            ("part", "", "how it ended", "seconds"),
            (
                (p.name, PARTS[p.name].title, _ending(p), _number(p.took_s))
                for p in parts
            ),
        ),
        "## What this says of the documentation",
        "",
        *_table(
            ("claim", "where", "measured", "verdict"),
            (_judged(claim, parts) for claim in CLAIMS),
        ),
    ]
    for part in parts:
        if part.rows:
            lines += [f"## {part.name}: {PARTS[part.name].title}", "", *_rows(part)]
    return "\n".join(lines).rstrip() + "\n"


def _rows(part: PartResult) -> Iterator[str]:
    header = ("what", "measured", "unit", "predicted", "measured / predicted", "note")
    cells = (
        (
            row.what,
            _value(row.measured),
            row.unit,
            _number(row.predicted),
            _number(row.ratio),
            row.note,
        )
        for row in part.rows
    )
    yield from _table(header, cells)


def _ending(part: PartResult) -> str:
    why = " ".join(part.why.split())
    if len(why) > _LONGEST_REASON:
        why = f"... {why[-_LONGEST_REASON:]}"
    return f"{part.state}: {why}" if why else part.state


def _judged(claim: Claim, parts: Sequence[PartResult]) -> tuple[str, str, str, str]:
    row = measured(claim, parts)
    if row is None or row.measured is None:
        return claim.text, claim.where, "", "not measured"
    verdict = "holds" if claim.holds(row) else "**does not hold**"
    return claim.text, claim.where, f"{_value(row.measured)} {row.unit}", verdict


def measured(claim: Claim, parts: Sequence[PartResult]) -> Row | None:
    """Return the row that decides a claim, if the session measured it."""
    rows = (row for part in parts if part.name == claim.part for row in part.rows)
    return next((row for row in rows if row.what == claim.what), None)


def _value(value: float | bool | str | None) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else _number(value)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _table(header: Sequence[str], rows: Any) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{' --- |' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"
    yield ""
