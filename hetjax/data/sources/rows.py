# SPDX-License-Identifier: Apache-2.0
"""Defines a row of data: a text, a prompt with its completion, or a conversation.

Owns the three kinds of row, and how a record of a recognised form becomes a row. Does
not own which form a record has (`forms.py`), what a message may hold (`messages.py`),
where records are (`readers.py`) nor how rows become tokens (`conversations.py`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetjax.data.sources.forms import (
    EXTRAS,
    PROMPTS,
    Form,
    FormsSeen,
    bad_row,
    check_beside_messages,
    check_characters,
    first_of,
    form_of,
)
from hetjax.data.sources.messages import (
    Message,
    conversation_in,
    messages_of,
    parsed_list,
    turn,
    with_system,
)
from hetjax.files.parsing import json_kind


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its completion; only the completion is learnt."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages with a role and a content each; those of the assistant are learnt.

    An answer with `"weight": 0` or `"train": false` is not learnt. `tools` are the
    functions that the assistant may call, `template_arguments` further inputs of the
    template.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


Row = str | Completion | Conversation


def row_of(
    record: object,
    column: str,
    where: str,
    *,
    format: str | None = None,
    seen: FormsSeen | None = None,
) -> Row:
    """Read one record; BadInput says where it is and what is wrong with it.

    `format` names the form of the rows; None: each is recognised. `seen` records the
    form, the first row, and the fields that are not used.
    """
    if not isinstance(record, Mapping):
        raise bad_row(f"{where} is {json_kind(record)}, not an object", column)
    form = form_of(record, column, format, where)
    row = _READERS[form.name](record, form, column, where)
    if seen is not None:
        extras = EXTRAS if isinstance(row, Conversation) else ()
        seen.add(form, (*form.used, *extras), record, row)
    return row


def canonical(row: Row) -> str:
    """Return a text that only equal rows share; for a document, the document."""
    if isinstance(row, str):
        return row
    if isinstance(row, Completion):
        return json.dumps([row.prompt, row.completion], ensure_ascii=False)
    found: Any = row.messages
    if row.tools or row.template_arguments:
        found = [row.messages, row.tools, row.template_arguments]
    return json.dumps(found, ensure_ascii=False, sort_keys=True, default=str)


def _text_row(record: Mapping[str, Any], form: Form, column: str, where: str) -> Row:
    """Return a text, unless it is a conversation that was written as JSON."""
    name = form.used[0]
    if isinstance(record[name], list):
        return _conversation(record, form, column, where)
    text = _text(record, name, column, where)
    found = None if form.is_asked else conversation_in(text)
    return text if found is None else _conversation(record, form, column, where)


def _conversation(
    record: Mapping[str, Any], form: Form, column: str, where: str
) -> Row:
    name = form.used[0]
    given = record[name]
    if isinstance(given, str):
        given = parsed_list(given, f"{where} holds a string in {name!r}", column)
    if not isinstance(given, list):
        kind = json_kind(given)
        raise bad_row(f"{where} holds {kind} in {name!r}, not messages", column)
    messages = messages_of(given, name, column, where)
    return _with_extras(record, messages, column, where)


def _completion(record: Mapping[str, Any], form: Form, column: str, where: str) -> Row:
    """Return a prompt with its completion: two texts, or two lists of messages."""
    prompt, answer = form.used[:2]
    parts = [_listed(record[name]) for name in (prompt, answer)]
    if any(isinstance(part, list) for part in parts):
        return _completed_messages(record, parts, form, column, where)
    made = Completion(*(_text(record, name, column, where) for name in form.used[:2]))
    if not made.completion.strip():
        raise bad_row(f"{where} has an empty {answer}", column)
    return made


def _listed(given: Any) -> Any:
    """Return the messages that a string holds as JSON, else the given value."""
    found = conversation_in(given) if isinstance(given, str) else None
    return given if found is None else found


def _completed_messages(
    record: Mapping[str, Any], parts: list[Any], form: Form, column: str, where: str
) -> Row:
    """Return the messages as TRL reads them: answers in the prompt are not learnt."""
    messages: list[Message] = []
    for name, role, part in zip(form.used, ("user", "assistant"), parts, strict=False):
        given = part if isinstance(part, list) else [turn(role, part)]
        found = messages_of(given, name, column, where)
        if role == "user":
            found = tuple({**m, "weight": 0} if _speaks(m) else m for m in found)
        messages += found
    return _with_extras(record, tuple(messages), column, where)


def _speaks(message: Message) -> bool:
    return message["role"] == "assistant"


def _instruction(record: Mapping[str, Any], form: Form, column: str, where: str) -> Row:
    """Return one turn, instruction with input and answer, or more with a `history`."""
    asked = first_of(record, PROMPTS)
    answered = first_of(record, ("output", "response", "completion"))
    more = first_of(record, ("input", "context"))
    assert asked is not None and answered is not None, record
    question = _text(record, asked, column, where)
    if more is not None and record[more]:
        question += "\n" + _text(record, more, column, where)
    answer = _text(record, answered, column, where)
    if not answer.strip():
        raise bad_row(f"{where} has an empty {answered}", column)
    before = _history(record.get("history"), column, where)
    turns = [turn("user", question), turn("assistant", answer)]
    messages = messages_of([*before, *turns], asked, column, where)
    return _with_extras(record, messages, column, where)


def _history(history: Any, column: str, where: str) -> list[Message]:
    found: list[Message] = []
    for pair in history or ():
        if not (isinstance(pair, Sequence) and len(pair) == 2):
            got = f"{where} has a history that is not pairs of a question and an answer"
            raise bad_row(got, column)
        found += [turn("user", pair[0]), turn("assistant", pair[1])]
    return found


def _with_extras(
    record: Mapping[str, Any],
    messages: tuple[Message, ...],
    column: str,
    where: str,
) -> Conversation:
    check_beside_messages(record, where)
    tools = record.get("tools") or ()
    if isinstance(tools, str):
        tools = parsed_list(tools, f"{where} holds a string in 'tools'", column)
    if not isinstance(tools, list | tuple) or not all(
        isinstance(tool, Mapping) for tool in tools
    ):
        raise bad_row(f"{where} holds no list of objects in 'tools'", column)
    arguments = record.get("chat_template_kwargs") or {}
    if not isinstance(arguments, Mapping):
        raise bad_row(f"{where} holds no object in 'chat_template_kwargs'", column)
    system = record.get("system")
    if system:
        _text(record, "system", column, where)
        messages = with_system(messages, system, column, where)
    return Conversation(messages, tuple(tools), dict(arguments))


def _text(record: Mapping[str, Any], name: str, column: str, where: str) -> str:
    text = record[name]
    if not isinstance(text, str):
        got = f"{where} holds {json_kind(text)} in {name!r}, not a string"
        raise bad_row(got, column)
    return check_characters(text, column, where)


_READERS = {
    "text": _text_row,
    "messages": _conversation,
    "sharegpt": _conversation,
    "completion": _completion,
    "alpaca": _instruction,
}
