# SPDX-License-Identifier: Apache-2.0
"""Reads multiple-choice questions: rows of a JSONL file, in the form of lm-eval tasks.

Owns the forms of such a row and the errors for a row of another form. Does not own how
a choice is judged (`hetjax/serving/choice_score.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetjax.data.sources.readers import decoded
from hetjax.errors import BadInput
from hetjax.files.parsing import json_kind, json_value
from hetjax.files.reading import read_bytes

_CONTEXT, _GOLD = ("context", "query"), ("gold", "answer")
_ALLOWED = (
    'rows {"context": ..., "choices": [..., ...], "gold": number of the right one, '
    'counted from 0}; "query" and "answer" may replace "context" and "gold"'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A text and its possible continuations, of which that of index `gold` is right."""

    context: str
    choices: tuple[str, ...]
    gold: int


def read_questions(path: Path) -> list[Question]:
    """Read all questions of a file; BadInput names the line, or says there are none."""
    try:
        lines = read_bytes(path, what="questions").splitlines()
    except OSError as error:
        raise BadInput(
            got=f"{path} cannot be read ({error.strerror})",
            allowed="a .jsonl file of multiple-choice questions",
            fix="correct --choices",
        ) from None
    found = list(_questions(path, lines))
    if not found:
        raise BadInput(got=f"no row in {path}", allowed=_ALLOWED, fix="add rows")
    return found


def _questions(path: Path, lines: list[bytes]) -> Iterator[Question]:
    for number, line in enumerate(lines, 1):
        where = f"{path} line {number}"
        text = decoded(line, where)
        if text.strip():
            yield _question(_object(text, where), where)


def _object(text: str, where: str) -> Mapping[str, Any]:
    try:
        found = json_value(text)
    except ValueError as error:
        raise _bad(f"{where} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise _bad(f"{where} is {json_kind(found)}, not an object")
    return found


def _question(row: Mapping[str, Any], where: str) -> Question:
    context = row[_named(row, _CONTEXT, where)]
    choices = row[_named(row, ("choices",), where)]
    gold = row[_named(row, _GOLD, where)]
    if not isinstance(context, str):
        raise _bad(f"{where} with a context that is {json_kind(context)}, not a string")
    texts = isinstance(choices, list) and all(isinstance(c, str) and c for c in choices)
    if not texts or len(choices) < 2:
        raise _bad(f"{where} with choices {str(choices)[:60]!r}, not two texts or more")
    if type(gold) is not int or not 0 <= gold < len(choices):
        raise _bad(f"{where} with the answer {gold!r} of {len(choices)} choices")
    return Question(context=context, choices=tuple(choices), gold=gold)


def _named(row: Mapping[str, Any], names: tuple[str, ...], where: str) -> str:
    """Return which of the fields the row has; it must have exactly one."""
    found = [name for name in names if name in row]
    if len(found) == 1:
        return found[0]
    if found:
        raise _bad(f"{where} with both {' and '.join(map(repr, found))}")
    fields = ", ".join(map(repr, row)) or "none"
    raise _bad(f"{where} has no {' or '.join(map(repr, names))} (its fields: {fields})")


def _bad(got: str) -> BadInput:
    return BadInput(got=got, allowed=_ALLOWED, fix="correct or delete the row")
