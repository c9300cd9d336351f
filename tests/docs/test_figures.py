# SPDX-License-Identifier: Apache-2.0
"""The figures of docs/figures.md are those of the results, with their commands."""

import json
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
SECTIONS = TEXT.split("\n## ")[1:]


def told(section: str, name: str) -> str:
    (found,) = re.findall(rf"^\* {name}: `?(.*?)`?$", section, re.MULTILINE)
    return found


def figure_at(result: Any, where: str) -> float:
    """Return the number at this path; for a list, its length."""
    found = reduce(
        lambda at, key: at[int(key)] if isinstance(at, list) else at[key],
        where.split("."),
        result,
    )
    return len(found) if isinstance(found, list) else found


def written(value: float, like: str) -> str:
    """Return the number in the page's format: as many digits, or as a percentage."""
    percent = like.endswith("%")
    digits = len(like.removesuffix("%").partition(".")[2])
    return f"{100 * value if percent else value:.{digits}f}{'%' * percent}"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.splitlines()[0])
def test_the_figures_are_in_the_result_with_their_command(section: str):
    result = json.loads((ROOT / told(section, "File")).read_text(encoding="utf-8"))
    assert result["command"] == told(section, "Command")
    if "machine" in result:
        assert result["machine"].startswith(told(section, "Machine"))
    rows = re.findall(r"^\| .* \| (\S+) \| `(.*)` \|$", section, re.MULTILINE)
    assert rows and len(rows) == section.count("\n| ") - 2
    for figure, where in rows:
        assert figure == written(figure_at(result, where), figure), where


def test_the_commands_are_modules_that_are_there():
    modules = re.findall(r"python -m (experiments[\w.]+)", TEXT)
    assert len(modules) == len(SECTIONS)
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
