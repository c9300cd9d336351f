# SPDX-License-Identifier: Apache-2.0
"""Any change of a file that hetjax reads gives an error in words, or a true reading.

500 changes in a short run, 20,000 with `--whole`.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.files.file_kinds import KINDS
from tests.files.fuzzed import SOUND
from tests.short_runs import draws

ROOT = Path(__file__).parents[2]
_SEEDS = [(0, 500), (500, 6_500), (7_000, 6_500), (13_500, 6_500)]
_PARSERS = {
    "json": {"load", "loads", "JSONDecoder", "decoder", "scanner"},
    "tomllib": {"load", "loads"},
    "pickle": {"load", "loads", "Unpickler"},
    "marshal": {"load", "loads"},
    "ast": {"literal_eval"},
    "numpy": {"load"},
    "np": {"load"},
    "safetensors": {"safe_open", "numpy"},
}
_METHODS = {"from_str", "from_file", "from_buffer"}  # of tokenizers
# where code parses without hetjax/files/, and why
_ELSEWHERE = {
    "data/chat/chat_template.py: json.loads": "between processes of ours",
    "data/chat/template_process.py: json.loads": "between processes of ours",
    "data/sources/record_files.py: json.JSONDecoder": "where a value ends, then read",
    "data/dataset.py: np.load": "arrays whose hash has been checked",
    "data/hugging_face.py: from_str": "text that was read by the reader",
    "data/tokenizer.py: from_str": "text that was read by the reader",
    "models/hugging_face/stored_tensors.py: safetensors.safe_open": "after its header",
}


@pytest.mark.parametrize("seeds", draws(_SEEDS, short=1), ids=str)
def test_changed_files_are_refused_or_read_as_they_say(seeds: tuple[int, int]) -> None:
    first, number = seeds
    command = [sys.executable, "-m", "tests.files.fuzzed", str(first), str(number)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3_000:]
    *found, last = done.stdout.splitlines()
    assert not found, "\n".join(found[:3])[:6_000]
    counts = json.loads(last)
    assert counts.keys() == KINDS.keys()
    assert sum(sum(each.values()) for each in counts.values()) == number
    assert {outcome for each in counts.values() for outcome in each} == {*SOUND}


def test_all_files_are_read_by_one_reader() -> None:
    found = {
        f"{path.relative_to(ROOT / 'hetjax').as_posix()}: {name}"
        for path in (ROOT / "hetjax").rglob("*.py")
        if path.relative_to(ROOT / "hetjax").parts[0] != "files"
        for name in _parsers(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == _ELSEWHERE.keys()


def _parsers(tree: ast.AST) -> Iterator[str]:
    """Yield the parsers that a module uses, imported whole or by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _METHODS:
            yield node.attr
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in _PARSERS.get(node.value.id, ()):
                yield f"{node.value.id}.{node.attr}"
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name in _PARSERS.get(node.module or "", ()):
                    yield f"{node.module}.{alias.name}"


def test_the_scan_sees_parsers() -> None:
    code = "from tomllib import loads\nmap(json.loads, x)\na.from_file(y)\n"
    found = {"tomllib.loads", "json.loads", "from_file"}
    assert {*_parsers(ast.parse(code))} == found
