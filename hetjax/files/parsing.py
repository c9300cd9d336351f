# SPDX-License-Identifier: Apache-2.0
"""Parses JSON and TOML that may come from other people: the one way to do so.

`json_value` and `toml_table` raise Malformed, a ValueError, and nothing else. This also
holds for deep nesting (checked before parsing, so that no stack overflows), numbers
with too many digits and a lone half of a surrogate pair. They refuse repeated keys,
which other parsers read differently. `read_json` and `parsed` turn Malformed into
three-part errors for people. Does not own reading (`reading.py`) nor keys and types
(`tables.py`).
"""

import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hetjax.errors import BadInput, placed
from hetjax.files.reading import MOST_BYTES, decoded, read_text

T = TypeVar("T")

_JSON_KINDS = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}

MOST_DEPTH = 64  # lists and tables within each other
MOST_VALUES = 4_000_000  # counted by commas and brackets; each takes up to 200 bytes
_MOST_DIGITS = 300  # of an integer: more is no finite float
_TOML_BYTES = 4 << 20  # its parser is written in Python, which is slow
# A string that nothing closes matches to the end of the text, so that matching takes
# linear time; the text is then refused anyway.
_JSON_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{},]', re.DOTALL)
_TOML_TOKEN = re.compile(
    r'"""[^"\\]*+(?:(?:\\.|"(?!""))[^"\\]*+)*+(?:"{3,5})?+'
    r"|'''[^']*+(?:'(?!'')[^']*+)*+(?:'{3,5})?+"
    r'|"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"?+'
    r"|'[^'\n]*+'?+"
    r"|#[^\n]*+"
    r"|[\[\]{},.=\n]",
    re.DOTALL,
)
_NO_KEY = "[]{},=\n"  # a dotted key does not continue after these


class Malformed(ValueError):
    """Text that is not JSON or TOML, or exceeds the limits for either."""


def json_value(text: str | bytes, *, finite: bool = True) -> Any:
    """Return the value of a JSON text; raises Malformed.

    With `finite`, NaN and Infinity, which are no JSON, and numbers too large for a
    float are refused; without it, the reader of the keys has to refuse them by name.

    >>> json_value('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    >>> json_value("[" * 200_000)
    Traceback (most recent call last):
    ...
    hetjax.files.parsing.Malformed: nested deeper than 64
    """
    if isinstance(text, bytes):
        text = decoded(text, "JSON")
    _check_nesting(text, _JSON_TOKEN)
    try:
        value = (_FINITE if finite else _ANY).decode(text)
    except (ValueError, RecursionError) as error:
        raise _malformed(error) from error
    if "\\ud" in text or "\\uD" in text:
        _check_strings(value)
    return value


def json_kind(value: object) -> str:
    """Return the type of a value of JSON in words; of others, Python's name.

    >>> json_kind([1]), json_kind(None), json_kind(b"")
    ('a list', 'null', 'a bytes value')
    """
    return _JSON_KINDS.get(type(value), f"a {type(value).__name__} value")


def toml_table(text: str) -> dict[str, Any]:
    """Return the table of a TOML text; raises Malformed.

    `nan` and `inf` are TOML: the reader of the keys has to refuse them.
    """
    if len(text) > _TOML_BYTES:
        raise Malformed(f"more than {_TOML_BYTES:,} characters")
    _check_nesting(text, _TOML_TOKEN)
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise _malformed(error) from error
    _check_depth(table)
    return table


def read_json(
    path: str | Path, *, what: str, fix: str, most_bytes: int = MOST_BYTES
) -> Any:
    """Return the value of a JSON file; BadInput begins with `what` and the path."""
    return parsed(
        read_text(path, what=what, most_bytes=most_bytes),
        json_value,
        what=f"JSON in {what} {str(path)!r}",
        allowed="a complete JSON file",
        fix=fix,
    )


def read_file(path: str | Path, parse: Callable[[str], T], *, what: str) -> T:
    """Return what `parse` makes of a file's text; BadInput starts with its path."""
    text = read_text(path, what=what)
    with placed(f"{what} {str(path)!r}"):
        return parse(text)


def parsed(
    text: str, parse: Callable[[str], Any], *, what: str, allowed: str, fix: str
) -> Any:
    """Return what `parse` makes of the text; BadInput if it raises another ValueError.

    `what` names the language, and the file if nothing else does.
    """
    try:
        return parse(text)
    except BadInput:
        raise
    except ValueError as error:
        problem = str(error).partition(";")[0]
        got = f"broken {what}: {problem}"
        raise BadInput(got=got, allowed=allowed, fix=fix) from error


def _malformed(error: Exception) -> Malformed:
    if isinstance(error, Malformed):
        return error
    if isinstance(error, json.JSONDecodeError):
        line = f"line {error.lineno} " if "\n" in error.doc else ""
        message = error.msg.removesuffix(" at")  # some of Python's end so
        return Malformed(f"{message} at {line}column {error.colno}")
    return Malformed(str(error)[:200])


def _check_nesting(text: str, token: re.Pattern[str]) -> None:
    """Raise Malformed for text that takes too deep a stack, too much memory or time.

    Dotted keys nest tables, too, and take quadratic time.
    """
    if sum(map(text.count, "[{.")) <= MOST_DEPTH and len(text) <= MOST_VALUES:
        return
    depth = num_dots = num_values = 0
    for found in token.finditer(text):
        kind = text[found.start()]
        num_dots = num_dots + 1 if kind == "." else 0 if kind in _NO_KEY else num_dots
        depth += (kind in "[{") - (kind in "]}" and depth > 0)
        num_values += kind in "[{,"
        if max(depth, num_dots) > MOST_DEPTH:
            raise Malformed(f"nested deeper than {MOST_DEPTH}")
        if num_values > MOST_VALUES:
            raise Malformed(f"more than {MOST_VALUES:,} values")


def _check_depth(table: dict[str, Any]) -> None:
    """Raise Malformed for a table nested too deep, by brackets or dotted keys."""
    level: list[Any] = [table]
    for _ in range(MOST_DEPTH):
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return
    raise Malformed(f"nested deeper than {MOST_DEPTH}")


def _inside(value: Any) -> list[Any]:
    """Return the lists and tables directly in a list or table."""
    values = value.values() if isinstance(value, dict) else value
    return [inner for inner in values if isinstance(inner, (dict, list))]


def _check_strings(value: Any) -> None:
    """Raise Malformed for a lone half of a UTF-16 pair, which no file can have."""
    level = [value]
    while level:
        strings = [one for one in level if isinstance(one, str)]
        for one in level:
            strings += one if isinstance(one, dict) else ()
        try:
            "".join(strings).encode()
        except UnicodeEncodeError as error:
            raise Malformed(
                "half a surrogate pair, which is not a character"
            ) from error
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)
        ]


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        times = Counter(key for key, _ in pairs)
        (repeated, most), *_ = times.most_common(1)
        raise Malformed(f"key {repeated[:80]!r} {most} times in one object")
    return table


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise Malformed(f"an integer of {len(digits):,} digits")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise Malformed(f"the number {digits[:40]}, which is not finite")
    return number


def _no_number(word: str) -> NoReturn:
    raise Malformed(f"{word}, which is not a JSON number")


_ANY = json.JSONDecoder(object_pairs_hook=_without_repeats, parse_int=_integer)
_FINITE = json.JSONDecoder(
    object_pairs_hook=_without_repeats,
    parse_int=_integer,
    parse_float=_finite,
    parse_constant=_no_number,
)
