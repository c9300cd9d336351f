# SPDX-License-Identifier: Apache-2.0
"""Recognises the form of a record of data by its fields.

Owns the names of forms, which fields each uses, which records are refused by name, and
the log of what a reading of a source has found (`FormsSeen`). Does not own how a record
becomes a row (`rows.py`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from hetjax.errors import BadInput

TEXT_COLUMN = "text"  # unless --data.column names another
Format = Literal["text", "messages", "sharegpt", "completion", "alpaca"]
FORMATS = get_args(Format)
PROMPTS = ("instruction", "prompt")
_ANSWERS = ("output", "response", "completion")
_CHATS = ("messages", "conversations", "conversation")
# Fields beside messages: inputs of the template, and the system message
EXTRAS = ("tools", "chat_template_kwargs", "system")
_INSTRUCTION = (*PROMPTS, "input", "context", *_ANSWERS, "history")
# Fields beside messages that answers depend on, but that no text can express
_UNKNOWN_TO_TEXT = ("images", "image", "videos", "video", "audio", "audios")
_REFUSED = (*_UNKNOWN_TO_TEXT, "functions", "function_call", "weight", "train")
# All fields that a row may be made of, or refused for
KNOWN = frozenset(
    (*_CHATS, *_INSTRUCTION, *EXTRAS, *_REFUSED, "chosen", "rejected", "label")
)
_MOST_NAMES = 20  # of fields that are named in a message
_SURROGATE = re.compile("[\ud800-\udfff]")
_FORMS = (
    '{"text": ...}, {"prompt": ..., "completion": ...}, '
    '{"messages": [{"role": ..., "content": ...}, ...]}, '
    '{"conversations": [{"from": ..., "value": ...}, ...]} or '
    '{"instruction": ..., "output": ...}'
)


@dataclass(frozen=True, slots=True)
class Form:
    """A form, and the fields that its rows use; the log names the first of these.

    `is_asked`: the user named the format, so that a string is taken as it is.
    """

    name: Literal["text", "messages", "sharegpt", "completion", "alpaca"]
    used: tuple[str, ...]
    is_asked: bool = False


@dataclass(slots=True)
class FormsSeen:
    """What a reading has found: forms, the first row, and unused fields."""

    forms: dict[str, str] = field(default_factory=dict)  # with the first field of each
    first: Any = None
    unused: dict[str, None] = field(default_factory=dict)

    def add(
        self, form: Form, used: Sequence[str], record: Mapping[str, Any], row: Any
    ) -> None:
        """Record a row, and which fields of its record were `used`."""
        if self.first is None:
            self.first = row
        self.forms.setdefault(form.name, form.used[0])
        for name in record:
            if name not in used and name not in self.unused:
                self.add_unused(name)

    def add_unused(self, name: str) -> None:
        if len(self.unused) < _MOST_NAMES:
            self.unused[name] = None


def form_of(
    record: Mapping[str, Any], column: str, format: str | None, where: str
) -> Form:
    """Return the form of a record; BadInput for one that has none, or is refused."""
    if format is None and column == TEXT_COLUMN and column not in record:
        _check_preference(record, where)
    form = form_of_fields(record, column, format)
    if form is None:
        raise no_form(record, column, format, where, "field")
    return form


def no_form(
    names: Iterable[str], column: str, format: str | None, where: str, kind: str
) -> BadInput:
    """Return the error for a record, or a table with these columns, without a form."""
    fields = ", ".join(map(repr, names)) or "none"
    wanted = f"no {kind} {column!r}"
    if format not in (None, "text"):
        wanted = f"not the {kind}s of the format {format}"
    return bad_row(f"{where} has {wanted} (its {kind}s: {fields})", column)


def form_of_fields(
    names: Mapping[str, Any] | Sequence[str], column: str, format: str | None
) -> Form | None:
    """Return the form by the names of fields alone; None: no form that is known."""
    if format is not None:
        return _asked_form(names, column, format)
    if column in names:
        return Form("text", (column,))
    if column != TEXT_COLUMN:
        return None
    if "messages" in names:
        return Form("messages", ("messages",))
    if "prompt" in names and "completion" in names:
        return Form("completion", ("prompt", "completion"))
    for name in _CHATS[1:]:
        if name in names:
            return Form("sharegpt", (name,))
    return _instruction_form(names, ("output", "response"))


def _asked_form(
    names: Mapping[str, Any] | Sequence[str], column: str, format: str
) -> Form | None:
    if format == "text":
        return Form("text", (column,), is_asked=True) if column in names else None
    if format == "alpaca":
        return _instruction_form(names, _ANSWERS)
    if format == "completion":
        answer = first_of(names, ("completion", "response"))
        if "prompt" not in names or answer is None:
            return None
        return Form("completion", ("prompt", answer), is_asked=True)
    chats = _CHATS if column == TEXT_COLUMN else (column,)
    name = first_of(names, chats)
    if name is None:
        return None
    kind = "messages" if format == "messages" else "sharegpt"
    return Form(kind, (name,), is_asked=True)


def _instruction_form(
    names: Mapping[str, Any] | Sequence[str], answers: Sequence[str]
) -> Form | None:
    prompt, answer = first_of(names, PROMPTS), first_of(names, answers)
    if prompt is None or answer is None:
        return None
    more = first_of(names, ("input", "context"))
    used = (prompt, answer, "history", *(() if more is None else (more,)))
    return Form("alpaca", used)


def first_of(
    names: Mapping[str, Any] | Sequence[str], wanted: Sequence[str]
) -> str | None:
    """Return the first of the wanted names that is there."""
    return next((name for name in wanted if name in names), None)


def _check_preference(record: Mapping[str, Any], where: str) -> None:
    """Raise BadInput for rows that say which of two answers is better."""
    is_pair = "chosen" in record and "rejected" in record
    is_judged = "completion" in record and isinstance(record.get("label"), bool)
    if not is_pair and not is_judged:
        return
    names = "'chosen' and 'rejected'" if is_pair else "'completion' and 'label'"
    better = "the chosen answer" if is_pair else "a good answer"
    advice = f'write rows {{"prompt": ..., "completion": {better}}}'
    if "messages" in record:
        advice = "add --data.format messages, which learns 'messages' alone"
    raise BadInput(
        got=f"{where} with {names}: a preference row",
        allowed="rows whose answers are all to be learnt; preferences cannot be "
        "learnt yet",
        fix=f"{advice}, or give another file",
    )


def check_beside_messages(record: Mapping[str, Any], where: str) -> None:
    """Raise BadInput for a field beside messages that would change what is learnt."""
    for name in _REFUSED:
        given = record.get(name)
        if name in ("weight", "train"):
            if given not in (None, 1):
                raise _refused_weight(name, given, where)
        elif given:
            raise _refused_field(name, where)


def _refused_weight(name: str, given: Any, where: str) -> BadInput:
    return BadInput(
        got=f"{where} with {str(given)[:40]!r} in {name!r} beside its messages",
        allowed="rows of equal weight",
        fix='delete the row, or give "weight": 0 to each answer not to be learnt',
    )


def _refused_field(name: str, where: str) -> BadInput:
    if name in _UNKNOWN_TO_TEXT:
        return BadInput(
            got=f"{where} with {name!r} beside its messages",
            allowed="conversations of text alone",
            fix=f"give rows without {name!r}",
        )
    return BadInput(
        got=f"{where} with {name!r}, an older form of 'tools'",
        allowed="functions in 'tools', and calls of them in 'tool_calls'",
        fix='write each function as {"type": "function", "function": ...} in "tools"',
    )


def check_characters(text: str, column: str, where: str) -> str:
    """Return the text; BadInput for half a surrogate pair."""
    if _SURROGATE.search(text):
        got = f"{where} has half a surrogate pair, which is not a character"
        raise bad_row(got, column)
    return text


def not_json(where: str, problem: object) -> BadInput:
    """Return the error for a row that is not JSON."""
    return BadInput(
        got=f"{where} is not JSON: {problem}",
        allowed="one JSON object in each line (.jsonl), or an array of them (.json)",
        fix="correct or delete it",
    )


def bad_row(got: str, column: str) -> BadInput:
    """Return the error for a row of a file whose texts are in this column."""
    if column != TEXT_COLUMN:
        return BadInput(
            got=got,
            allowed=f"rows with a text or messages in {column!r}, each message with "
            "a role and a content",
            fix="name another column with --data.column, or correct or delete the row",
        )
    return BadInput(
        got=got,
        allowed=f"rows of one of the forms {_FORMS}",
        fix="name the column of the text with --data.column, or correct or delete the "
        'row; a valid one is {"text": "Once upon a time"}',
    )
