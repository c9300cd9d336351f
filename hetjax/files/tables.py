# SPDX-License-Identifier: Apache-2.0
"""Reads one table of a file that a user wrote by hand, with types.

Owns the checks that TOML and JSON files share (unknown keys, missing keys, wrong
types). Does not own text (`reading.py`, `parsing.py`) nor any file's meaning
(`cluster/cluster_files.py`, `plans/plan_files.py`).
"""

import difflib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hetjax.errors import BadInput

Kind = Literal[
    "a string", "an integer", "a number", "true or false", "a table", "a list"
]

_TYPES: dict[Kind, type | tuple[type, ...]] = {
    "a string": str,
    "an integer": int,
    "a number": (int, float),
    "true or false": bool,
    "a table": dict,
    "a list": list,
}
_KINDS: dict[Any, Kind] = {
    str: "a string",
    Path: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    tuple: "a list",
}
_TOO_LARGE = 2**63


def read_record(
    raw: object,
    *,
    where: str,
    required: Mapping[str, Kind],
    optional: Mapping[str, Kind] | None = None,
) -> dict[str, Any]:
    """Return the table's values, with numbers as floats; BadInput names the place.

    `where` is the path of the table in its file ("" for the whole file).
    """
    table = as_kind(raw, "a table", where=where or "the file")
    kinds: dict[str, Kind] = {**required, **(optional or {})}
    for key in table:
        if key not in kinds:
            raise _unknown_key(key, kinds, where)
    for key, kind in required.items():
        if key not in table:
            raise _missing_key(key, kind, where)
    return {
        key: as_kind(value, kinds[key], where=join(where, key))
        for key, value in table.items()
    }


def read_fields(
    raw: object, record: type, *, where: str, optional: Collection[str] = ()
) -> dict[str, Any]:
    """Return the values of a table whose keys are the fields of a dataclass.

    Fields with a default and fields that are `optional` may be missing in the file.
    """
    kinds, with_default = _kinds_of(record)
    free = with_default | {*optional}
    return read_record(
        raw,
        where=where,
        required={key: kind for key, kind in kinds.items() if key not in free},
        optional={key: kind for key, kind in kinds.items() if key in free},
    )


@cache
def _kinds_of(record: type) -> tuple[dict[str, Kind], set[str]]:
    """Return what a file has for each field, and which fields have a default."""
    hints = get_type_hints(record)
    read = [field for field in fields(record) if is_in_files(field)]
    kinds: dict[str, Kind]
    kinds = {field.name: kind_of(hints[field.name]) for field in read}
    return kinds, {field.name for field in read if _has_default(field)}


def is_in_files(field: Field[Any]) -> bool:
    """Whether files have this field; if not, its metadata has `in_files` False."""
    return bool(field.metadata.get("in_files", True))


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def kind_of(hint: Any) -> Kind:
    """Return the kind of value in files for a field of this type, optional or not."""
    if NoneType in get_args(hint):
        (hint,) = (arg for arg in get_args(hint) if arg is not NoneType)
    if get_origin(hint) is Literal:
        hint = type(get_args(hint)[0])
    return _KINDS.get(get_origin(hint) or hint, "a table")


def read_list(values: Iterable[object], kind: Kind, *, where: str) -> tuple[Any, ...]:
    """Return the entries of a list if all are of the kind."""
    return tuple(
        as_kind(value, kind, where=f"{where}[{i}]") for i, value in enumerate(values)
    )


def as_kind(value: Any, kind: Kind, *, where: str) -> Any:
    """Return the value if it is of the kind, a number as a finite float."""
    # bool is an int to Python, not to a reader of the file
    fits = isinstance(value, _TYPES[kind]) and (
        not isinstance(value, bool) or kind == "true or false"
    )
    if not fits or (kind == "a number" and not _is_finite(value)):
        raise BadInput(
            got=f"{where} = {_shown(value)}",
            allowed=f"{where} is {kind}",
            fix=f"write {where} as {kind}",
        )
    if kind == "an integer" and abs(value) >= _TOO_LARGE:
        raise BadInput(
            got=f"{where} of {value.bit_length()} bits",
            allowed=f"{where} is an integer of 64 bits, sign included",
            fix=f"correct {where}",
        )
    return float(value) if kind == "a number" else value


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def join(where: str, key: str) -> str:
    """Return the path of a key in the table at `where`."""
    return f"{where}.{key}" if where else key


def _unknown_key(key: str, kinds: Mapping[str, Kind], where: str) -> BadInput:
    near = difflib.get_close_matches(key, list(kinds), n=1)
    return BadInput(
        got=f"unknown key {join(where, key)!r}",
        allowed=f"keys of {where or 'the file'}: {', '.join(kinds)}",
        fix=f"did you mean {near[0]!r}?" if near else f"remove {key!r}",
    )


def _missing_key(key: str, kind: Kind, where: str) -> BadInput:
    return BadInput(
        got=f"{where or 'the file'} has no key {key!r}",
        allowed=f"{key!r} is required and is {kind}",
        fix=f"add {key!r} to {where or 'the file'}",
    )


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:
        text = "an integer of too many digits to show"
    return text if len(text) <= 60 else f"{text[:57]}..."
