# SPDX-License-Identifier: Apache-2.0
"""The list of metrics, which mkdocs makes whenever it builds the pages.

Owns the columns. Does not own the metrics (`hetjax/report/metrics.py`).
"""

from typing import Any

from hetjax.report.metrics import METRICS

PLACE = "<!-- the list of metrics -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the list where a page has a place for it; mkdocs calls this by its name."""
    return markdown.replace(PLACE, table())


def table() -> str:
    """Return the metrics as a table in Markdown."""
    rows = [(f"`{m.key}`", m.label, m.unit, m.meaning) for m in METRICS]
    head = ("key", "what it is", "unit", "exactly")
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * 4, *rows))
