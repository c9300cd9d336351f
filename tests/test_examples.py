# SPDX-License-Identifier: Apache-2.0
"""The examples in docstrings do what they say."""

import ast
import doctest
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import hetjax

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hetjax"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def with_examples() -> Iterator[str]:
    """Yield the names of modules with examples."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if ">>> " in path.read_text(encoding="utf-8"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts).removesuffix(".__init__")


@pytest.mark.parametrize("module", [*with_examples()])
def test_the_examples_of_a_module_hold(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    found = doctest.testmod(import_module(module), optionflags=FLAGS)
    assert found.attempted and not found.failed


def documented(name: str) -> Iterator[str]:
    """Yield the docstrings of a public name; for a class, of its public parts, too."""
    found = getattr(hetjax, name)
    yield inspect.getdoc(found) or ""
    if not inspect.isclass(found):
        return
    tree = ast.parse(inspect.getsource(found)).body[0]
    assert isinstance(tree, ast.ClassDef)
    for part in tree.body:
        if isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
            yield ast.get_docstring(part) or ""


@pytest.mark.parametrize("name", hetjax.__all__)
def test_every_public_name_is_documented(name: str):
    assert all(documented(name))


def test_every_public_function_and_class_has_an_example():
    without = {
        name
        for name in hetjax.__all__
        if not any(">>> " in text for text in documented(name))
    }
    assert without == set()
