# SPDX-License-Identifier: Apache-2.0
"""Files as accidents and attackers change them: bytes, values, keys, encodings, kinds.

`mutate` changes a file in place and depends only on a random generator, so a seed
reproduces its change. Does not own the files (`file_kinds.py`).
"""

import json
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_DEEP = 50_000
_RAW = "@@raw@@"
# replacement values: JSON text, which is also TOML except for null and objects
_VALUES = (
    *("null", "true", "false", "0", "-1", "1", "7", "1.5", "-0.0", "1e9", "1000000000"),
    *("9223372036854775807", "9223372036854775808", "1e18", "1e308", "1e400", "-1e400"),
    *("NaN", "Infinity", "-Infinity", "nan", "inf", "1" * 400, "1" * 5_000),
    *('""', '"ab"', '"8"', '"1e9"', '"../../x"', '"/dev/zero"', '"a\\u0000b"', '"-"'),
    *('"\\ud800"', '"é"', '"' + "x" * 3_000 + '"', '"' + "9" * 400 + '"', '"\\n"'),
    *("[]", "[1]", "[-1]", '["a"]', "[[]]", "[null]", "[1e9, 1e9]", "[0, 1000000000]"),
    *("{}", '{"x": 1}', '{"name": "a"}', '{"content": 3}', '[{"name": 1}]'),
    "[1000000000, 1000000000]",
    "[" * _DEEP,
    "[" * _DEEP + "]" * _DEEP,
    '{"a":' * _DEEP + "1" + "}" * _DEEP,
    "[" + "[0], " * 300 + "0]",
)
_ENCODINGS = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig", "latin-1")
KINDS_OF_FILE = ("a FIFO", "a device", "a folder", "a circle", "nothing")
Edit = Callable[[bytes, random.Random], bytes]


def mutate(
    path: Path,
    rng: random.Random,
    seal: Callable[[Any], Any] | None,
    kinds: Sequence[str],
) -> str:
    """Change the file; return in a few words how.

    With `seal`, change values of its JSON; `seal` then corrects the checksums.
    Otherwise the file may become one of these `kinds`.
    """
    data = path.read_bytes()
    if seal is not None:
        path.write_bytes(_sealed(data, rng, seal))
        return "value, sealed again"
    name = rng.choice([*_WEIGHTS])
    if name == "kind of file" and kinds:
        return _another_kind(path, rng.choice(kinds))
    path.write_bytes(_WEIGHTS[name](data, rng))
    return name


def _flipped(data: bytes, rng: random.Random) -> bytes:
    found = bytearray(data or b"0")
    for _ in range(rng.choice((1, 1, 2, 8))):
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def _cut(data: bytes, rng: random.Random) -> bytes:
    start, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return rng.choice((data[:start], data[start:], data[:start] + data[end:], b""))


def _inserted(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    start, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    what = (rng.randbytes(8), b"\0" * 9, b"[" * _DEEP, b'"', b"{", data[start:end])
    return data[:at] + rng.choice(what) + data[at:]


def _encoded(data: bytes, rng: random.Random) -> bytes:
    text = data.decode(errors="replace")
    return text.encode(rng.choice(_ENCODINGS), errors="replace")


def _revalued(data: bytes, rng: random.Random) -> bytes:
    """Change a value, a key or an item of its JSON, in one line or in the whole."""
    header, text, tail = _json_part(data, rng)
    try:
        value = json.loads(text)
    except ValueError:
        return _retokened(data, rng)
    changed = _changed(value, rng)
    return header(changed.encode()) + changed.encode() + tail


def _retokened(data: bytes, rng: random.Random) -> bytes:
    """Change one TOML value, or repeat, rename or remove a line."""
    text = data.decode(errors="replace")
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    key, _, _ = lines[at].partition("=")
    lines[at] = rng.choice(
        (
            f"{key}= {rng.choice(_VALUES)}",
            f"{key}= {rng.choice(_VALUES)}",
            f"{lines[at]}\n{lines[at]}",
            f"x{lines[at]}",
            "",
            f"{'.'.join('a' * 5_000)} = 1",
            re.sub(r"[0-9]+", lambda _: rng.choice(_VALUES), lines[at], count=1),
        )
    )
    return "\n".join(lines).encode()


def _json_part(
    data: bytes, rng: random.Random
) -> tuple[Callable[[bytes], bytes], str, bytes]:
    """Return what precedes the JSON (given its new text), the JSON, and the rest."""
    length = int.from_bytes(data[:8], "little")
    if 2 <= length < len(data) and data[8:9] == b"{":  # safetensors
        text = data[8 : 8 + length].decode(errors="replace")
        return lambda t: len(t).to_bytes(8, "little"), text, data[8 + length :]
    lines = data.decode(errors="replace").splitlines(keepends=True)
    if len(lines) > 1 and lines[0].rstrip().endswith("}"):  # JSONL
        at = rng.randrange(len(lines))
        before, after = "".join(lines[:at]).encode(), "".join(lines[at + 1 :]).encode()
        return lambda _: before, lines[at], b"\n" + after
    return lambda _: b"", "".join(lines), b"\n"


def _changed(value: Any, rng: random.Random) -> str:
    """Return JSON text of the value with one place changed."""
    places = [*_places(value)]
    raw = rng.choice(_VALUES)
    if not places:
        return raw
    holder, key = rng.choice(places)
    how = rng.randrange(8)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, dict):
        text = json.dumps(value | {"x": 1} if isinstance(value, dict) else value)
        name = json.dumps(key)
        return text.replace(f"{name}: ", f"{name}: {raw[:99]}, {name}: ", 1)
    elif how == 2 and isinstance(holder, dict):
        holder[rng.choice(("x", "", "../x", "a\0b", "é" * 200))] = holder.pop(key)
    elif how == 3:
        other, name = rng.choice(places)
        swapped = json.loads(json.dumps(other[name]))
        holder[key] = swapped
    else:
        holder[key] = _RAW
    return json.dumps(value).replace(f'"{_RAW}"', raw)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each holder and key inside a value."""
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def _sealed(data: bytes, rng: random.Random, seal: Callable[[Any], Any]) -> bytes:
    text = _changed(json.loads(data), rng)
    try:
        return (json.dumps(seal(json.loads(text))) + "\n").encode()
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return text.encode()


def _another_kind(path: Path, kind: str) -> str:
    path.unlink()
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a circle":
        path.symlink_to(path.name)
    return kind


_WEIGHTS: dict[str, Edit] = {
    "bits": _flipped,
    "cut": _cut,
    "inserted": _inserted,
    "encoding": _encoded,
    "value": _revalued,
    "value 2": _revalued,
    "value 3": _revalued,
    "value 4": _revalued,
    "kind of file": _flipped,  # made elsewhere, see `mutate`
}
