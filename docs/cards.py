# SPDX-License-Identifier: Apache-2.0
"""The table of sessions with cards, which mkdocs makes whenever it builds the pages.

Each session is a column. Owns the rows. Does not own the results: files of
`experiments/results/gpu/`, which people send.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "experiments" / "results" / "gpu"
PLACE = "<!-- the table of sessions -->"
NOTHING = "No session has been sent so far: there is no figure of a card yet."
# what a row is called, the part that measures it, and that part's words for it
ROWS = (
    ("tokens/s", "speed", "rate, hetjax"),
    ("of the peak", "speed", "model FLOP utilization, hetjax"),
    ("over one plain jit", "speed", "rate of hetjax over one plain jit"),
    ("over PyTorch", "speed", "rate of hetjax over PyTorch"),
    (
        "peak memory over prediction",
        "memory",
        "peak of memory over the prediction, the highest",
    ),
    ("same bits again", "bits", "a step again in one process: equal to the bit"),
    (
        "same bits, deterministic",
        "bits",
        "a step in another process, deterministic: equal to the bit",
    ),
    ("its step over the usual", "bits", "step, deterministic over default"),
    (
        "gain of an unequal plan",
        "unequal",
        "gain of the planner's layout over the better of the other two",
    ),
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the table where a page has a place for it; mkdocs calls this by its name."""
    if PLACE not in markdown:
        return markdown
    paths = sorted(RESULTS.glob("*.json"))
    sessions = {path.stem: json.loads(path.read_text("utf-8")) for path in paths}
    return markdown.replace(PLACE, table(sessions))


def table(sessions: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the sessions, by name of file, as a table in Markdown."""
    if not sessions:
        return NOTHING
    titles = ("card", "date", "parts done", *(title for title, _, _ in ROWS), "file")
    columns = [[*_cells(session), f"`{name}`"] for name, session in sessions.items()]
    head, *rows = zip(titles, *columns, strict=True)
    rows = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(session: Mapping[str, Any]) -> Iterator[str]:
    parts: Sequence[Mapping[str, Any]] = session["parts"]
    yield str(session["card"]).replace("|", "/")
    yield session["date"]
    yield f"{sum(part['state'] == 'done' for part in parts)} of {len(parts)}"
    measured = {
        (part["name"], row["what"]): row["measured"]
        for part in parts
        for row in part["rows"]
    }
    for _, part, what in ROWS:
        yield _shown(measured.get((part, what)))


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.3g}"
