# SPDX-License-Identifier: Apache-2.0
"""Reads the messages of a conversation, in the forms that data sets use.

Owns what a message may hold, and the conversion of other forms to messages with a role
and a content: ShareGPT's `from` and `value`, contents that are lists of texts, and
conversations in a JSON string. Does not own rows (`rows.py`) nor what a chat template
makes of messages (`chat_template.py`).
"""

from collections.abc import Mapping
from typing import Any

from hetjax.data.sources.forms import bad_row, check_characters
from hetjax.errors import BadInput
from hetjax.files.parsing import Malformed, json_kind, json_value

Message = Mapping[str, Any]

ASSISTANT = "assistant"
# Fields that say whether an answer is learnt; the template does not get them
LEARNT_FIELDS = ("weight", "train")
# Fields that may hold reasoning; the first that a message has counts
REASONING = ("reasoning_content", "thinking", "reasoning")
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "model": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": ASSISTANT,
}
_ROLE_NAMES = ", ".join(_ROLES)


def turn(role: str, content: Any) -> dict[str, Any]:
    """Return a message of this role."""
    return {"role": role, "content": content}


def is_learnt(message: Message) -> bool:
    """Whether the message is an answer that the model has to learn."""
    if message["role"] != ASSISTANT:
        return False
    return message.get("weight") != 0 and message.get("train") is not False


def conversation_in(text: str) -> list[Any] | None:
    """Return the messages that a text holds as JSON; None: it is plain text."""
    start = text[:200].lstrip()
    if not start.startswith("[") or not start[1:].lstrip().startswith("{"):
        return None
    try:
        found = json_value(text, finite=False)
    except Malformed:
        return None
    is_chat = all(
        isinstance(one, dict) and ({"role", "from"} & one.keys()) for one in found
    )
    return found if is_chat else None


def parsed_list(text: str, got: str, column: str) -> list[Any]:
    """Return the list that a string holds as JSON; BadInput if it holds none."""
    try:
        found = json_value(text, finite=False)
    except Malformed:
        found = None
    if isinstance(found, list):
        return found
    is_python = text.lstrip().startswith(("[{'", "[{ '"))
    how = " but a Python one; json.dumps writes JSON" if is_python else ""
    raise bad_row(f"{got} that is not a JSON list{how}", column)


def messages_of(
    given: list[Any], name: str, column: str, where: str
) -> tuple[Message, ...]:
    """Read the messages of a row; BadInput names the message and what is wrong."""
    if not given:
        raise bad_row(f"{where} has no message in {name!r}", column)
    return tuple(
        _message(message, column, f"{where}, message {number}")
        for number, message in enumerate(given, 1)
    )


def with_system(
    messages: tuple[Message, ...], system: str, column: str, where: str
) -> tuple[Message, ...]:
    """Put the row's own system message first; BadInput if there is another."""
    if messages[0]["role"] == "system" and messages[0].get("content") != system:
        got = f"{where} has 'system' and a different system message"
        raise bad_row(got, column)
    is_there = messages[0]["role"] == "system"
    return messages if is_there else (turn("system", system), *messages)


def _message(message: object, column: str, where: str) -> Message:
    if not isinstance(message, Mapping):
        got = f"{where} is {json_kind(message)}, not an object"
        raise bad_row(got, column)
    if "from" in message and "role" not in message:
        message = _from_sharegpt(message, column, where)
    if "role" not in message:
        fields = ", ".join(map(repr, message)) or "none"
        raise bad_row(f"{where} has no role (its fields: {fields})", column)
    _check_string(message, "role", column, where)
    if not message["role"]:
        raise bad_row(f"{where} has an empty role", column)
    if isinstance(message.get("content"), list):
        message = {**message, "content": _joined(message["content"], column, where)}
    _check_content(message, column, where)
    _check_learnt(message, column, where)
    return message


def _check_content(message: Message, column: str, where: str) -> None:
    """Check the content; an answer that calls tools, or reasons, may have none."""
    says = (*REASONING, "tool_calls")
    if message.get("content") is None and any(message.get(name) for name in says):
        return
    if "content" not in message:
        fields = ", ".join(map(repr, message)) or "none"
        raise bad_row(f"{where} has no content (its fields: {fields})", column)
    _check_string(message, "content", column, where)


def _check_string(message: Message, name: str, column: str, where: str) -> None:
    if not isinstance(message[name], str):
        kind = json_kind(message[name])
        raise bad_row(f"{where} holds {kind} in {name!r}, not a string", column)
    check_characters(message[name], column, where)


def _check_learnt(message: Message, column: str, where: str) -> None:
    weight, train = (message.get(name) for name in LEARNT_FIELDS)
    if weight is not None and weight not in (0, 1):
        raise _not_learnt(f"{where} has the weight {str(weight)[:40]!r}")
    if train is not None and not isinstance(train, bool):
        raise _not_learnt(f"{where} has {str(train)[:40]!r} in 'train'")
    if message["role"] != ASSISTANT and (weight or train):
        role = message["role"]
        raise _not_learnt(f"{where} has the role {role!r}, but is marked to be learnt")


def _not_learnt(got: str) -> BadInput:
    return BadInput(
        got=got,
        allowed='"weight" 0 or 1, or "train" true or false; only 0 or false for '
        "messages that are not the assistant's",
        fix="correct the row: each answer is learnt whole or not at all, with equal "
        "weight",
    )


def _joined(parts: list[Any], column: str, where: str) -> str:
    """Return the text of a content that is a list of texts."""
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            if part.get("type", "text") != "text":
                raise _no_text(part.get("type"), where)
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part)
            raise _no_text(kind, where)
    return "".join(texts)


def _no_text(kind: Any, where: str) -> BadInput:
    return BadInput(
        got=f"{where} with a part of type {str(kind)[:40]!r} in its content",
        allowed='contents that are a string, or a list of {"type": "text", "text": '
        "...}",
        fix="give rows that contain only text",
    )


def _from_sharegpt(message: Message, column: str, where: str) -> Message:
    speaker = message["from"]
    role = _ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise BadInput(
            got=f"{where} is from {str(speaker)[:40]!r}",
            allowed=f"messages from one of {_ROLE_NAMES}",
            fix="correct the row, or write messages with a role and a content",
        )
    if "value" not in message:
        fields = ", ".join(map(repr, message)) or "none"
        raise bad_row(f"{where} has no value (its fields: {fields})", column)
    others = {k: v for k, v in message.items() if k not in ("from", "value")}
    if speaker == "function_call":
        calls = _calls(message["value"], column, where)
        return {"role": role, "content": "", "tool_calls": calls, **others}
    return {"role": role, "content": message["value"], **others}


def _calls(value: Any, column: str, where: str) -> list[dict[str, Any]]:
    """Return the calls that a `function_call` of ShareGPT holds as JSON."""
    try:
        found = json_value(value, finite=False) if isinstance(value, str) else value
    except Malformed:
        found = None
    calls: list[Any] = found if isinstance(found, list) else [found]
    if not all(isinstance(c, dict) and "name" in c for c in calls):
        got = f'{where} holds no {{"name": ..., "arguments": ...}} in a function_call'
        raise bad_row(got, column)
    return [{"type": "function", "function": dict(call)} for call in calls]
