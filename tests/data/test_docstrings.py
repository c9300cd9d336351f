# SPDX-License-Identifier: Apache-2.0
"""Docstrings of files as Python finds them, in order, for any reader."""

import ast
from pathlib import Path

import pytest

from hetjax.data.sources import docstrings

LONG = "All of this is said at length. " * 10 + "So."


def expected(path: Path) -> list[str]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [n for n in ast.walk(ast.parse(path.read_bytes())) if isinstance(n, owners)]
    texts = [ast.get_docstring(node) for node in nodes]
    return [text for text in texts if text and len(text) > 200]


@pytest.mark.parametrize("num_cores", [1, 2, 3, 64, None])
def test_the_order_is_that_of_the_files_however_many_read_them(
    num_cores: int | None, monkeypatch: pytest.MonkeyPatch
):
    paths = sorted(Path(ast.__file__).parent.glob("a*.py"))
    assert len(paths) > 4
    monkeypatch.setattr("os.cpu_count", lambda: num_cores)
    found = list(docstrings.docstrings(paths))
    assert found == [text for path in paths for text in expected(path)]
    assert len(found) > 10


def test_what_is_no_python_or_half_a_character_is_left_out(tmp_path: Path):
    good, bad, half = (tmp_path / name for name in ("good.py", "bad.py", "half.py"))
    good.write_text(f'def f():\n    """{LONG}"""\n')
    bad.write_text("print 'of another time'\n")
    half.write_text(f'"""\\ud800 {LONG}"""\n')
    assert list(docstrings.docstrings([bad, good, half])) == [LONG]
    assert list(docstrings.docstrings([])) == []


def test_a_reader_that_fails_is_told(tmp_path: Path):
    with pytest.raises(ChildProcessError, match="docstrings"):
        list(docstrings.docstrings([tmp_path / "none.py"]))
