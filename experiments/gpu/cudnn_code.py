# SPDX-License-Identifier: Apache-2.0
"""Lists the cards that a wheel of NVIDIA has code for: compute capabilities by library.

    pip download --no-deps nvidia-cudnn-cu12==9.10.2.21
    python -m experiments.gpu.cudnn_code nvidia_cudnn_cu12-*.whl

Reads the headers of the fat binaries that nvcc embeds in libraries: a magic number, the
size, then an entry for each program. One field of an entry is the architecture. Prints
JSON. Needs no card and no CUDA.
"""

import json
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

_MAGIC = b"\x50\xed\x55\xba"
_HEADER = struct.Struct("<4sHHQ")  # magic, version, header bytes, bytes of entries
_ENTRY = struct.Struct("<HHIQ")  # kind, flags, header bytes, bytes of the program
_ARCHITECTURE = struct.Struct("<I")
_ARCHITECTURE_AT = 28
_MACHINE_CODE = 2  # 1 is PTX, which only later cards can use


def capabilities(library: bytes) -> list[float]:
    """Return the compute capabilities that the library has machine code for, sorted."""
    found = {
        architecture
        for start, end in _fat_binaries(library)
        for kind, architecture in _entries(library, start, end)
        if kind == _MACHINE_CODE
    }
    return [architecture / 10 for architecture in sorted(found)]


def _fat_binaries(library: bytes) -> Iterator[tuple[int, int]]:
    at = library.find(_MAGIC)
    while at >= 0:
        if at + _HEADER.size <= len(library):
            _, version, header, size = _HEADER.unpack_from(library, at)
            end = at + header + size
            if version == 1 and header == _HEADER.size and end <= len(library):
                yield at + header, end
        at = library.find(_MAGIC, at + 1)


def _entries(library: bytes, at: int, end: int) -> Iterator[tuple[int, int]]:
    while at + _ARCHITECTURE_AT + _ARCHITECTURE.size <= end:
        kind, _, header, size = _ENTRY.unpack_from(library, at)
        if header < _ENTRY.size:
            return
        yield kind, _ARCHITECTURE.unpack_from(library, at + _ARCHITECTURE_AT)[0]
        at += header + size


def main() -> None:
    for wheel in map(Path, sys.argv[1:]):
        with zipfile.ZipFile(wheel) as packed:
            names = [name for name in packed.namelist() if ".so" in name]
            found = {n.rpartition("/")[2]: capabilities(packed.read(n)) for n in names}
        print(json.dumps({"wheel": wheel.name, "libraries": found}))


if __name__ == "__main__":
    main()
