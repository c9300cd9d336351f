# SPDX-License-Identifier: Apache-2.0
"""Rows of words as a table: aligned text for a terminal, HTML for a notebook.

Owns the layout. Does not own any row (`plan.py`, `hetjax/report/`).
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
    """Return the same table in HTML, which may be scrolled if it is wide.

    `title` and `notes` are lines before and after it.

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
    from jinja2 import Environment  # which a terminal does not need

    blocks = Environment(autoescape=True, trim_blocks=True)
    return blocks.from_string(_HTML.rstrip())
