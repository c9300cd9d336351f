# SPDX-License-Identifier: Apache-2.0
"""Rows of words as a table: aligned text for a terminal, HTML for a notebook.

Owns the layout. Does not own any row (`plan.py`, `hetjax/report/`).
"""

from collections.abc import Iterator, Sequence
from html import escape

Rows = Sequence[Sequence[str]]


def aligned(header: Sequence[str], rows: Rows) -> list[str]:
    """Return the lines of a table, every column as wide as its widest cell.

    >>> aligned(("node", "devices"), [("a100-0", "0,1")])
    ['node    devices', 'a100-0  0,1']
    """
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def html_table(header: Sequence[str], rows: Rows) -> Iterator[str]:
    """Yield the lines of the same table in HTML, which may be scrolled if it is wide.

    >>> list(html_table(("node",), [("a<b",)]))[2]
    '<tr><td>a&lt;b</td></tr>'
    """
    yield '<div class="scroll"><table>'
    yield f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in header)}</tr>"
    for row in rows:
        yield f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
    yield "</table></div>"
