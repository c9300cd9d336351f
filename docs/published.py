# SPDX-License-Identifier: Apache-2.0
"""The table of predicted published runs, which mkdocs makes whenever it builds pages.

Owns its columns. Does not own the result (`experiments/accuracy/published/`).
"""

import json
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parents[1] / "experiments/results/accuracy_published.json"
PLACE = "<!-- the table of published runs -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the table in its place."""
    if PLACE not in markdown:
        return markdown
    return markdown.replace(PLACE, table(json.loads(RESULT.read_text())))


def table(found: dict[str, Any]) -> str:
    """Lay the families out, each a row."""
    lines = [
        "| runs | rows | min | median | max | below 1 | in their interval |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for family in found["families"]:
        figures = (f"{family[key]:.2f}" for key in ("least", "median", "most"))
        lines.append(
            f"| {family['name']} | {family['rows']} | {' | '.join(figures)} | "
            f"{family['below_one']} | {family['covered']:.0%} |"
        )
    return "\n".join(lines)
