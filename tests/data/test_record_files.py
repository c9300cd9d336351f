# SPDX-License-Identifier: Apache-2.0
"""Files of records: arrays, compressed files and tables, and damaged ones."""

import csv
import gzip
import io
import json
import tracemalloc
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hetjax.data.sources import record_files
from hetjax.data.sources.readers import rows
from hetjax.data.sources.record_files import records
from hetjax.errors import BadInput

RECORDS = [
    {"text": f'row {n}: \u00e9\U0001f600 "quoted", [x]\n', "id": str(n)}
    for n in range(50)
]

_ROWS = b'{"text": "a"}\n' * 99


def _lines(values: list[Any]) -> str:
    return "\n".join(json.dumps(value) for value in values) + "\n"


def _table(delimiter: str = ",") -> str:
    made = io.StringIO(newline="")
    writer = csv.DictWriter(made, ["text", "id"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(RECORDS)
    return made.getvalue()


def _zst(data: bytes) -> bytes:
    zstandard: Any = import_module("zstandard")  # an extra
    half = len(data) // 2
    parts = (data[:half], data[half:])  # two frames, as `cat` joins files
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in parts)


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".jsonl", _lines(RECORDS)),
        (".JSONL", _lines(RECORDS)),
        (".ndjson", _lines(RECORDS)),
        (".json", json.dumps(RECORDS)),
        (".json", json.dumps(RECORDS, indent=2, ensure_ascii=False) + "\n"),
        (".json", _lines(RECORDS)),
        (".json", "\n\n".join(json.dumps(r, indent=2) for r in RECORDS)),
        (".csv", _table()),
        (".tsv", _table("\t")),
    ],
)
def test_a_file_of_records_gives_what_was_written(tmp_path, suffix, text, packed):
    path = tmp_path / f"a{suffix}{packed}"
    pack: Callable[[bytes], bytes] = {"": bytes, ".gz": gzip.compress, ".zst": _zst}[
        packed
    ]
    path.write_bytes(pack(text.encode()))
    assert list(rows(path, "text")) == [record["text"] for record in RECORDS]


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=10,
)


@settings(max_examples=60, deadline=None)
@example([123, 45], 1, True, False)
@given(st.lists(_VALUES, max_size=8), st.integers(1, 9), st.booleans(), st.booleans())
def test_values_are_those_of_the_whole_text_wherever_reads_end(
    tmp_path_factory, values, num_bytes, is_array, is_indented
):
    path = tmp_path_factory.mktemp("json") / "a.json"
    indent = 1 if is_indented else None
    parts = [json.dumps(v, ensure_ascii=False, indent=indent) for v in values]
    text = json.dumps(values, ensure_ascii=False, indent=indent)
    path.write_text(text if is_array else "\n".join(parts), encoding="utf-8")
    if not is_array and parts and parts[0].startswith("["):
        return  # the file then holds an array
    before, record_files._READ_BYTES = record_files._READ_BYTES, num_bytes
    try:
        found = [value for _, value in records(path, ".json", "text", None, None)]
    finally:
        record_files._READ_BYTES = before
    assert found == values


def test_no_more_of_an_array_is_in_memory_than_is_read_at_once(tmp_path):
    path = tmp_path / "a.json"
    with path.open("w") as file:
        file.write("[")
        for number in range(20_000):
            file.write(json.dumps({"text": f"{number} " * 200}) + ",\n")
        file.write('{"text": "last"}]')
    assert path.stat().st_size > 20_000_000
    tracemalloc.start()
    try:
        count = sum(1 for _ in rows(path, "text"))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 20_001
    assert most_bytes < 8_000_000


def test_fields_between_semicolons_are_recognised(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text;id\na, b;1\n")
    with pytest.raises(BadInput, match="by commas, not by semicolons"):
        list(rows(path, "text"))


@pytest.mark.parametrize(
    ("name", "content", "got"),
    [
        ("a.json", b'[{"text": "a"}, {"text": ]', "row 2 is not JSON: Expecting value"),
        ("a.json", b'[{"text": "a"} {"text": "b"}]', "no ',' or ']' after row 1"),
        ("a.json", b'[{"text": "a"}] []', "no ',' or ']' after row 1"),
        ("a.json", b'[{"text": "a"}', "no ',' or ']' after row 1"),
        ("a.json", b'[{"text": "a"},', "row 2 is not JSON"),
        ("a.json", b"[" * 100_000, "is not JSON"),
        ("a.json", b'[{"text": "\xff"}]', "is not UTF-8 (byte 0xff at offset 11)"),
        ("a.json", b'{"data": []}', "has no field 'text' (its fields: 'data')"),
        ("a.json", '[{"text": "a"}]'.encode("utf-16"), "is UTF-16"),
        ("a.csv", b"text,id\na\n", "row 1 has 1 field, but the header has 2"),
        ("a.csv", b"text,text\na,b\n", "has two columns named 'text'"),
        ("a.csv", b'text\n"a', "is not CSV: unexpected end of data"),
        ("a.csv", b"text\n\xff\n", "is not UTF-8"),
        ("a.csv", b"body\na\n", "row 1 has no field 'text' (its fields: 'body')"),
        ("a.jsonl.gz", b"no", "cannot be decompressed"),
        # without the time: the test's name holds its bytes, equal in all processes
        ("a.jsonl.gz", gzip.compress(_ROWS, mtime=0)[:-9], "cannot be decompressed"),
        ("a.jsonl.zst", b"no, it is none", "cannot be decompressed"),
    ],
)
def test_what_is_damaged_is_named(tmp_path, name, content, got):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        list(rows(path, "text"))
    assert caught.value.got.startswith(str(path)) and got in caught.value.got


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_a_record_without_end_is_refused_before_it_fills_the_memory(
    tmp_path, name, monkeypatch
):
    monkeypatch.setattr(record_files, "_MOST_BYTES", 3_000_000)
    path = tmp_path / name
    start = "text\n" if name.endswith("csv") else '{"text": "'
    path.write_text(start + "x" * 9_000_000 + ('"}' if start[0] == "{" else ""))
    with pytest.raises(BadInput) as caught:
        list(rows(path, "text"))
    assert "more than 2 MiB" in caught.value.got or "field limit" in caught.value.got


def test_without_zstandard_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"0000")
    with pytest.raises(BadInput, match=r"pip install 'hetjax\[zst\]'"):
        list(rows(path, "text"))
