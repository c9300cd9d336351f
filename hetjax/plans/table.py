# SPDX-License-Identifier: Apache-2.0
"""Formats rows of strings as tables: aligned text for terminals, HTML for notebooks.

Owns the layout. Does not own the rows themselves (`plan.py`, `hetjax/report/`).
"""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template

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


def html_table(
    header: Sequence[str], rows: Rows, *, title: str = "", notes: Sequence[str] = ()
) -> str:
    """Return the table of `aligned` in HTML; wide tables scroll.

    `title` is a line above the table, `notes` are lines below it.

    >>> print(html_table(("node",), [("a<b",)]))
    <div class="scroll"><table>
    <tr><th>node</th></tr>
    <tr><td>a&lt;b</td></tr>
    </table></div>
    """
    return _template().render(title=title, header=header, rows=rows, notes=notes)


_HTML = """\
{% if title %}
<p>{{ title }}</p>
{% endif %}
<div class="scroll"><table>
<tr>{% for cell in header %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% for note in notes %}
<p>{{ note }}</p>
{% endfor %}
"""


@cache
def _template() -> "Template":
    from jinja2 import Environment  # imported late: terminal output does not need it

    blocks = Environment(autoescape=True, trim_blocks=True)
    return blocks.from_string(_HTML.rstrip())
