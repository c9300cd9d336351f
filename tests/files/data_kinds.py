# SPDX-License-Identifier: Apache-2.0
"""Files that users bring: training rows in each form, and questions."""

import gzip
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import zstandard

from hetjax.data.dataset import load, prepare
from hetjax.data.settings import Ingredients
from hetjax.data.sources.questions import read_questions
from hetjax.data.sources.readers import rows
from tests.files.file_kind import FileKind, written

_ROWS = """{"text": "one"}
{"prompt": "a", "completion": "b"}
{"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}
"""
_QUESTIONS = """{"context": "one", "choices": ["a", "b"], "gold": 1}
{"query": "two", "choices": ["c", "d", "e"], "answer": 0}
"""
_OF_ROWS = ("a FIFO", "a device")


def _dataset(folder: Path) -> None:
    (folder / "text.txt").write_text("some words of a text\n\n\nothers\n\n\n" * 400)
    wanted = Ingredients(path=folder / "text.txt")
    shutil.move(prepare(folder / "cache", wanted, 300).directory, folder / "dataset")


def _read_dataset(folder: Path) -> Any:
    found = load(folder / "dataset")
    assert math.isfinite(found.bytes_per_token)
    return found.bytes_per_token, found.num_tokens, dict(found.hashes)


def _of_rows(name: str, make: Callable[[Path], object]) -> FileKind:
    """Return a file of rows; `make` writes it into a folder."""
    return FileKind(
        kinds_of_file=_OF_ROWS,
        make=make,
        target=name,
        read=lambda folder: [*rows(folder / name, "text")],
    )


def _packed(name: str, pack: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(pack(_ROWS.encode()))


def _parquet(folder: Path) -> None:
    chat = json.loads(_ROWS.splitlines()[-1])
    table = pyarrow.Table.from_pylist([chat, chat | {"system": "Be brief."}])
    pyarrow.parquet.write_table(table, folder / "r.parquet")


_ARRAY = json.dumps([json.loads(line) for line in _ROWS.splitlines()], indent=1)
_CSV = 'text,other\n"one, two",3\nfour,\n'

DATA_KINDS: Mapping[str, FileKind] = {
    "rows": _of_rows("r.jsonl", written("r.jsonl", _ROWS)),
    "rows as JSON": _of_rows("r.json", written("r.json", _ARRAY)),
    "rows as CSV": _of_rows("r.csv", written("r.csv", _CSV)),
    "rows in Parquet": _of_rows("r.parquet", _parquet),
    "rows in gzip": _of_rows("r.jsonl.gz", _packed("r.jsonl.gz", gzip.compress)),
    "rows in zstd": _of_rows("r.jsonl.zst", _packed("r.jsonl.zst", zstandard.compress)),
    "text": _of_rows("r.txt", written("r.txt", "one\n\n\ntwo\n")),
    "questions": FileKind(
        make=written("q.jsonl", _QUESTIONS),
        target="q.jsonl",
        read=lambda f: read_questions(f / "q.jsonl"),
    ),
    "dataset": FileKind(
        make=_dataset, target="dataset/manifest.json", read=_read_dataset
    ),
}
