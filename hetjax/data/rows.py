# SPDX-License-Identifier: Apache-2.0
"""What a row of data may be: a text, a prompt with its completion, or a conversation.

Owns the forms of a row and what is said of one that has none of them. Does not own
where rows are (`readers.py`) nor how they become tokens (`conversations.py`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetjax.errors import BadInput

TEXT_COLUMN = "text"  # unless --data.column names another
_SURROGATE = re.compile("[\ud800-\udfff]")
_COMPLETION = ("prompt", "completion")
_FORMS = (
    '{"text": ...}, {"prompt": ..., "completion": ...} or '
    '{"messages": [{"role": ..., "content": ...}, ...]}'
)


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and what is to follow it, which alone is learnt."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages with a role and a content each; those of the assistant are learnt."""

    messages: tuple[Mapping[str, Any], ...]


Row = str | Completion | Conversation


def row_of(record: object, column: str, where: str) -> Row:
    """Read one record; BadInput says where it is and what is wrong with it.

    The column holds a text or messages. Where there is none and nobody asked for
    another than `text`, messages are looked for, then a prompt with its completion.
    """
    if not isinstance(record, Mapping):
        raise bad_row(f"{where} is a {type(record).__name__}, not an object", column)
    found = column_of(record, column)
    if found is None:
        fields = ", ".join(map(repr, record)) or "none"
        got = f"{where} has no field {column!r} (its fields: {fields})"
        raise bad_row(got, column)
    if found == "prompt":
        return _completion(record, column, where)
    if isinstance(record[found], list):
        return Conversation(_messages(record[found], found, column, where))
    return _text(record, found, column, where)


def canonical(row: Row) -> str:
    """Give a text that only equal rows have; a document is its own."""
    if isinstance(row, str):
        return row
    if isinstance(row, Completion):
        return json.dumps([row.prompt, row.completion], ensure_ascii=False)
    return json.dumps(row.messages, ensure_ascii=False, sort_keys=True, default=str)


def column_of(names: Mapping[str, Any] | Sequence[str], column: str) -> str | None:
    """Which of the fields makes the row, `prompt` with its completion; None: none."""
    if column in names:
        return column
    if column == TEXT_COLUMN and "messages" in names:
        return "messages"
    if column == TEXT_COLUMN and all(name in names for name in _COMPLETION):
        return "prompt"
    return None


def _completion(record: Mapping[str, Any], column: str, where: str) -> Completion:
    made = Completion(*(_text(record, name, column, where) for name in _COMPLETION))
    if not made.completion.strip():
        raise bad_row(f"{where} has an empty completion", column)
    return made


def _text(record: Mapping[str, Any], name: str, column: str, where: str) -> str:
    text = record[name]
    if not isinstance(text, str):
        got = f"{where} holds {type(text).__name__} in {name!r}, not a string"
        raise bad_row(got, column)
    return _characters(text, column, where)


def _characters(text: str, column: str, where: str) -> str:
    if _SURROGATE.search(text):
        got = f"{where} has half a surrogate pair, which is no character"
        raise bad_row(got, column)
    return text


def _messages(
    messages: list[Any], name: str, column: str, where: str
) -> tuple[Mapping[str, Any], ...]:
    if not messages:
        raise bad_row(f"{where} has no message in {name!r}", column)
    for number, message in enumerate(messages, 1):
        _check_message(message, column, f"{where}, message {number}")
    return tuple(messages)


def _check_message(message: object, column: str, where: str) -> None:
    if not isinstance(message, Mapping):
        got = f"{where} is a {type(message).__name__}, not an object"
        raise bad_row(got, column)
    for name in ("role", "content"):
        if name not in message:
            fields = ", ".join(map(repr, message)) or "none"
            raise bad_row(f"{where} has no {name} (its fields: {fields})", column)
        if not isinstance(message[name], str):
            kind = type(message[name]).__name__
            got = f"{where} holds {kind} in {name!r}, not a string"
            raise bad_row(got, column)
        _characters(message[name], column, where)
    if not message["role"]:
        raise bad_row(f"{where} has an empty role", column)


def bad_row(got: str, column: str) -> BadInput:
    """Say what is wrong with a row of a file whose texts are in this column."""
    if column != TEXT_COLUMN:
        return BadInput(
            got=got,
            allowed=f"rows with a text or messages in {column!r}, each message with "
            "a role and a content",
            fix="name another column with --data.column, or mend or delete the row",
        )
    return BadInput(
        got=got,
        allowed=f"rows of one of the forms {_FORMS}",
        fix="name the column of the text with --data.column, or mend or delete the "
        'row; a good one is {"text": "Once upon a time"}',
    )
