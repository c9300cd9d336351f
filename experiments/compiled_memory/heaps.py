# SPDX-License-Identifier: Apache-2.0
"""Reads the heap of a program for TPUs, as its compiler lays it out.

For a TPU's program, `memory_analysis` reports the heap plus, once more, the heap's
bytes lost between buffers, as the compiler counts them. A log of libtpu 0.0.42.1
(`TPU_STDERR_LOG_LEVEL=0 TPU_MIN_LOG_LEVEL=0`) shows both, and what the program
requires, which has the lost bytes once. XLA's dump of the buffers has the heap to the
byte.

Owns the reading of that dump. Does not own what is compiled.
"""

import os
import re
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

_DUMPED = "*after_optimizations-buffer-assignment.txt"
# in the device's main memory, which has no color; newer releases of XLA print a page
_HEAP = re.compile(
    r"^allocation \d+: size (\d+), (?:page \d+, )?preallocated-temp:", re.MULTILINE
)

_heaps: dict[bytes, int] = {}  # by program, because each is compiled and dumped once
_dumps: list[tempfile.TemporaryDirectory[str]] = []


def dump_heaps() -> None:
    """Make XLA dump what this process compiles. Call this before any compilation."""
    _dumps.append(tempfile.TemporaryDirectory(prefix="heaps-"))
    flags = os.environ.get("XLA_FLAGS", "")
    dump = f"--xla_dump_to={_dumps[-1].name} --xla_dump_hlo_as_text"
    os.environ["XLA_FLAGS"] = f"{flags} {dump}".strip()


def heap_bytes(program: Any) -> int:
    """Return the bytes of the heap of a program, the last compiled of its name."""
    text = program.as_text()
    known = sha256(text.encode()).digest()
    if known not in _heaps:
        _heaps[known] = _dumped_bytes(text.split(maxsplit=2)[1].rstrip(","))
    return _heaps[known]


def _dumped_bytes(module: str) -> int:
    """Read the last dump of a module, `HloModule NAME, ...`, and remove the dumps."""
    dumps = Path(_dumps[-1].name)
    *_, found = sorted(dumps.glob(f"*.{module}.{_DUMPED}"))
    heaps = _HEAP.findall(found.read_text(encoding="utf-8"))
    for path in dumps.glob(f"*.{module}.*.txt"):
        path.unlink()
    return sum(map(int, heaps))
