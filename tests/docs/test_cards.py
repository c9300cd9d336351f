# SPDX-License-Identifier: Apache-2.0
"""The table of sessions holds the sent results, or says that there are none."""

import ast
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.docs.hooks import ROOT, hook

PAGE = (ROOT / "docs" / "how" / "cards.md").read_text(encoding="utf-8")
PARTS = ROOT / "experiments" / "gpu" / "parts"


@pytest.fixture(scope="module")
def cards() -> ModuleType:
    return hook("cards")


def session(**measured: Any) -> dict[str, Any]:
    """Return what a session writes about two parts, one of which ran out of time."""
    rows = [
        {"what": "rate, hetjax", "measured": 12345.6},
        {"what": "rate of hetjax over one plain jit", "measured": 0.98765},
    ]
    again = {"what": "a step again in one process: equal to the bit", "measured": False}
    parts = [
        {"name": "speed", "state": "done", "rows": rows},
        {"name": "bits", "state": "out of time", "rows": [again]},
    ]
    return {"card": "A | B", "date": "2026-12-24", "parts": parts} | measured


def made(cards: ModuleType) -> str:
    """Return the page as mkdocs requests it."""
    return cards.on_page_markdown(PAGE, page=None, config=None, files=None)


@pytest.fixture
def folder(cards: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cards, "RESULTS", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_a_table_without_sessions_says_so(cards: ModuleType):
    page = made(cards)
    assert page == PAGE.replace(cards.PLACE, cards.NOTHING) != PAGE


def test_each_session_is_a_column(cards: ModuleType, folder: Path):
    for name, card in (("b-2026", "B"), ("a-2026", "A | A")):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(session(card=card)), encoding="utf-8")
    page = made(cards)
    (table,) = re.findall(r"^\| card .*?(?=\n\n)", page, re.M | re.S)
    cells = [line.strip("|").split("|") for line in table.splitlines()]
    head, _, *rows = [[cell.strip() for cell in row] for row in cells]
    header, first, second = zip(head, *rows, strict=True)
    shown = dict(zip(header, first, strict=True))
    assert (shown["card"], second[0]) == ("A / A", "B")  # in order of file names
    assert shown["file"] == "`a-2026`"
    assert (shown["date"], shown["parts done"]) == ("2026-12-24", "1 of 2")
    assert (shown["tokens/s"], shown["over one plain jit"]) == ("12,346", "0.988")
    assert (shown["same bits again"], shown["over PyTorch"]) == ("no", "")


def test_other_pages_stay_as_they_are(cards: ModuleType):
    assert cards.on_page_markdown("# A page") == "# A page"


def is_text_of(source: str, wanted: str) -> bool:
    """Return whether a Python file has that text, or an f-string that could give it."""
    nodes = [*ast.walk(ast.parse(source))]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
    patterns = [
        "".join(
            re.escape(str(value.value)) if isinstance(value, ast.Constant) else "(.*)"
            for value in node.values
        )
        for node in nodes
        if isinstance(node, ast.JoinedStr)
    ]
    matches = [m for p in patterns if (m := re.fullmatch(p, wanted))]
    return wanted in texts or any(
        len(match[0]) > sum(map(len, match.groups()))
        and all(not put_in or put_in in texts for put_in in match.groups())
        for match in matches
    )


def test_rows_are_of_what_parts_measure(cards: ModuleType):
    for _, part, what in cards.ROWS:
        source = (PARTS / f"{part}.py").read_text(encoding="utf-8")
        assert is_text_of(source, what), f"{part} has no row {what!r}"
