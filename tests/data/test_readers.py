# SPDX-License-Identifier: Apache-2.0
"""Rows of JSONL and Parquet files, and documents read line by line."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.data.sources.readers import documents, rows
from hetjax.data.sources.rows import Completion, Conversation
from hetjax.errors import BadInput

MESSAGES = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
]


def _jsonl(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return path


def _parquet(path: Path, *records: dict[str, Any]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.Table.from_pylist(list(records)), path
    )
    return path


WRITERS = pytest.mark.parametrize(
    ("write", "name", "place"),
    [(_jsonl, "a.jsonl", "line"), (_parquet, "a.parquet", "row")],
)


@given(st.lists(st.sampled_from(["a", " b", "", " ", "\t", "  \t", "c "])))
def test_documents_are_parted_as_a_regular_expression_parts_the_whole_text(lines):
    for text in ("\n".join(lines), "\n".join([*lines, ""])):
        parted = re.split(r"\n(?:[ \t]*\n){2,}", text)
        expected = [piece.strip("\n") for piece in parted]
        found = list(documents(text.splitlines(keepends=True)))
        assert [x for x in found if x] == [x for x in expected if x]


@WRITERS
def test_a_row_is_a_text_a_completion_or_a_conversation(tmp_path, write, name, place):
    path = tmp_path / name
    assert list(rows(write(path, {"id": 1, "text": "a\u00e9"}), "text")) == ["a\u00e9"]
    write(path, {"prompt": "a", "completion": "b"})
    assert list(rows(path, "text")) == [Completion("a", "b")]
    write(path, {"prompt": "a", "messages": MESSAGES})
    assert list(rows(path, "text")) == [Conversation(tuple(MESSAGES))]


@WRITERS
def test_a_named_column_holds_texts_or_messages(tmp_path, write, name, place):
    path = write(tmp_path / name, {"text": "no", "body": "b", "chat": MESSAGES})
    assert list(rows(path, "body")) == ["b"]
    assert list(rows(path, "chat")) == [Conversation(tuple(MESSAGES))]


@WRITERS
@pytest.mark.parametrize(
    ("record", "got"),
    [
        ({"text": 5}, "holds a number in 'text', not a string"),
        ({"prompt": "a", "completion": " "}, "has an empty completion"),
        (
            {"prompt": "a", "completion": 1},
            "holds a number in 'completion', not a string",
        ),
        ({"messages": []}, "has no message in 'messages'"),
        (
            {"messages": [{"by": "user", "value": "a"}]},
            ", message 1 has no role (its fields: 'by', 'value')",
        ),
        (
            {"messages": [MESSAGES[0], {"role": "", "content": "a"}]},
            ", message 2 has an empty role",
        ),
        (
            {"messages": [{"role": "user", "content": 1}]},
            ", message 1 holds a number in 'content', not a string",
        ),
    ],
)
def test_a_bad_row_is_named(tmp_path, write, name, place, record, got):
    path = write(tmp_path / name, record)
    with pytest.raises(BadInput) as caught:
        list(rows(path, "text"))
    assert caught.value.got.startswith(f"{path} {place} 1")
    assert caught.value.got.endswith(got)
    assert "--data.column" in caught.value.fix


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path):
    path = _jsonl(tmp_path / "a.jsonl", {"text": "a", "id": 1})
    with pytest.raises(BadInput) as caught:
        list(rows(path, "body"))
    expected = f"{path} line 1 has no field 'body' (its fields: 'text', 'id')"
    assert caught.value.got == expected
    assert "'body'" in caught.value.allowed


def test_a_missing_column_of_a_parquet_file_is_named_once(tmp_path):
    path = _parquet(tmp_path / "a.parquet", {"body": "a", "id": 1})
    with pytest.raises(BadInput) as caught:
        list(rows(path, "text"))
    expected = f"{path} has no column 'text' (its columns: 'body', 'id')"
    assert caught.value.got == expected


def test_rows_of_a_parquet_file_are_counted_over_its_groups(tmp_path):
    records = [{"text": str(i)} for i in range(2_500)] + [{"text": None}]
    path = _parquet(tmp_path / "a.parquet", *records)
    read = rows(path, "text")
    assert [next(read) for _ in range(2_500)] == [r["text"] for r in records[:-1]]
    with pytest.raises(BadInput, match="row 2501 holds null in 'text'"):
        next(read)


def test_a_file_that_is_not_parquet_is_refused(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(BadInput, match="cannot be read as Parquet"):
        list(rows(path, "text"))


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "a.parquet"
    path.touch()
    with pytest.raises(BadInput, match=r"pip install 'hetjax\[parquet\]'"):
        list(rows(path, "text"))
