# SPDX-License-Identifier: Apache-2.0
"""The table of families names all published presets, each in its row, and all tiny
models that tests compare with transformers."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from hetjax.models import presets
from tests.models.hugging_face.test_fixtures import FIXTURES

ROOT = Path(__file__).parents[2]
PUBLISHED = Path(presets.__file__).with_name("published.toml")


def rows() -> Iterator[list[list[str]]]:
    """Yield each row as the names in each of its cells."""
    text = (ROOT / "docs/train.md").read_text(encoding="utf-8")
    _, table = text.split("| family |")
    for line in table.split("\n\n")[0].splitlines()[2:]:
        yield [re.findall(r"`(.+?)`", cell) for cell in line.split("|")[2:-1]]


def test_each_published_preset_is_in_the_row_of_its_type():
    told = {name: kind for (kind,), names, _ in rows() for name in names}
    published = tomllib.loads(PUBLISHED.read_text())
    kinds = {name: fields["model_type"] for name, fields in published.items()}
    assert told == {n: {"gemma3": "gemma3_text"}.get(k, k) for n, k in kinds.items()}


def test_each_tiny_model_is_in_the_row_of_its_type():
    told = {name: kind for (kind,), _, names in rows() for name in names}
    assert told == {
        folder.name: json.loads((folder / "config.json").read_text())["model_type"]
        for folder in FIXTURES.iterdir()
    }


def test_the_tests_that_the_page_names_are_there():
    text = (ROOT / "docs/train.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/\S+\.py)`", text)
    assert len(named) >= 5 and all((ROOT / name).is_file() for name in named)
