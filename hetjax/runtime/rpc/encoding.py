# SPDX-License-Identifier: Apache-2.0
"""Encodes messages as JSON text, and checks them on arrival.

Owns the form, {"version": .., "message": CLASS, "fields": {..}}, and the check of
incoming data against the class's type hints: data that no `encode` of this version can
have written raises BadMessage, and no other error. Does not own the classes
(`schema.py`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import cache
from reprlib import repr as quoted
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from hetjax.files.parsing import json_value
from hetjax.runtime.rpc.schema import Message, Request

VERSION = 5  # of the protocol: both sides must have the same
_WHOLE = 1 << 53  # floats represent all smaller integers exactly
_M = TypeVar("_M", bound=Message)


class BadMessage(ValueError):
    """The data received is no message of this protocol."""


def encode(message: Message) -> np.ndarray:
    """Return the message as bytes (uint8)."""
    name, fields = type(message).__name__, asdict(message)
    frame = {"version": VERSION, "message": name, "fields": fields}
    return np.frombuffer(json.dumps(frame).encode(), np.uint8)


def decode(data: np.ndarray, expected: type[_M]) -> _M:
    """Return the message that `encode` wrote as these bytes; raise BadMessage.

    Also raises BadMessage for a message that is not of the `expected` class.
    """
    try:
        frame = json_value(data.tobytes(), finite=False)
    except ValueError as error:
        raise BadMessage(f"not JSON: {error}") from error
    if not isinstance(frame, dict) or frame.get("version") != VERSION:
        raise BadMessage(f"{quoted(frame)} is not of version {VERSION}")
    if frame.keys() != {"version", "message", "fields"}:
        raise BadMessage(f"{quoted(frame)} does not have the form of a message")
    found = kinds().get(str(frame["message"]))
    if found is None or not issubclass(found, expected):
        what = expected.__name__.lower()
        raise BadMessage(f"{quoted(frame['message'])} is not a known {what}")
    return _typed(found, frame["fields"], found.__name__)


@cache
def kinds() -> Mapping[str, type[Message]]:
    """Return the classes of messages by name."""
    found = {*Message.__subclasses__(), *Request.__subclasses__()}
    return {kind.__name__: kind for kind in found - {Request}}


_hints = cache(get_type_hints)


def _typed(hint: Any, found: Any, where: str) -> Any:
    """Return the JSON value as the type that the hint says; raise BadMessage."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return _one_of(parts, found, where)
    if kind is Any or (kind is Literal and found in parts):
        return found
    if kind is float and type(found) is int and abs(found) < _WHOLE:
        return float(found)
    if kind in (int, float, str, bool, NoneType) and type(found) is kind:
        return found
    if isinstance(found, dict):
        if is_dataclass(kind):
            return _object(kind, found, where)
        if kind is Mapping:
            key, value = parts
            return {
                _typed(key, k, where): _typed(value, v, f"{where}[{quoted(k)}]")
                for k, v in found.items()
            }
    if isinstance(found, list) and kind in (tuple, Sequence):
        every = parts if kind is tuple else parts * len(found)
        if len(every) == len(found):
            items = zip(every, found, strict=True)
            return tuple(
                _typed(h, v, f"{where}[{n}]") for n, (h, v) in enumerate(items)
            )
    raise BadMessage(f"{where} = {quoted(found)} is not of type {hint}")


def _object(kind: Any, found: Mapping[str, Any], where: str) -> Any:
    hints = _hints(kind)
    if wrong := found.keys() ^ hints.keys():
        name = min(wrong)
        raise BadMessage(
            f"{where} {'has' if name in found else 'lacks'} {quoted(name)}"
        )
    return kind(**{n: _typed(hints[n], v, f"{where}.{n}") for n, v in found.items()})


def _one_of(hints: Sequence[Any], found: Any, where: str) -> Any:
    for hint in hints[:-1]:
        try:
            return _typed(hint, found, where)
        except BadMessage:
            continue
    return _typed(hints[-1], found, where)
