# SPDX-License-Identifier: Apache-2.0
"""The heap of a program for TPUs, as its compiler lays it out.

`memory_analysis` has for a TPU's program not its heap, but the heap and once more what
of it is lost between buffers, as the compiler counts that: a log of libtpu 0.0.42.1
(`TPU_STDERR_LOG_LEVEL=0 TPU_MIN_LOG_LEVEL=0`) tells both beside what the program
requires, which has it once. XLA's dump of the buffers has the heap to the byte.

Owns the reading of that dump. Does not own what is compiled.
"""

import os
import re
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

_DUMPED = "*after_optimizations-buffer-assignment.txt"
# of the device's main memory, which has no color; newer releases of XLA tell a page
_HEAP = re.compile(
    r"^allocation \d+: size (\d+), (?:page \d+, )?preallocated-temp:", re.MULTILINE
)

_heaps: dict[bytes, int] = {}  # by program: one that is compiled once is dumped once
_dumps: list[tempfile.TemporaryDirectory[str]] = []


def dump_heaps() -> None:
    """Let XLA dump what it compiles in this process, which has compiled nothing yet."""
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
    """Read what was dumped last of a module, `HloModule NAME, ...`, and remove it."""
    dumps = Path(_dumps[-1].name)
    *_, found = sorted(dumps.glob(f"*.{module}.{_DUMPED}"))
    heaps = _HEAP.findall(found.read_text(encoding="utf-8"))
    for path in dumps.glob(f"*.{module}.*.txt"):
        path.unlink()
    return sum(map(int, heaps))
