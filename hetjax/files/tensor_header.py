# SPDX-License-Identifier: Apache-2.0
"""Reads the header of a file of safetensors: which tensors it has, and where.

Owns the check that the header describes its file, before a library maps the file. Does
not own reading tensors (`models/hugging_face/tensors.py`).
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetjax.files.parsing import Malformed, json_value
from hetjax.files.reading import opened

_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # the limit of the library
_METADATA = "__metadata__"
_MOST_DIMS = 32
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """A tensor of a file; `start` and `end` count bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def tensor_header(path: str | Path) -> Mapping[str, TensorInfo]:
    """Return the tensors of a file of safetensors by name, as its header has them.

    Raises Malformed if the header does not fit the file, Unreadable if that is no plain
    file, and OSError as `open` does.
    """
    with opened(path, what="weights") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if num_bytes < _LENGTH_BYTES + length or length > _MOST_HEADER_BYTES:
            raise Malformed(
                f"a header of {length:,} bytes in a file of {num_bytes:,} bytes"
            )
        text = file.read(length)
    header = json_value(text)
    if not isinstance(header, dict):
        raise Malformed("a header that is not an object")
    end = num_bytes - _LENGTH_BYTES - length
    return {
        name: _tensor(name, found, end)
        for name, found in header.items()
        if name != _METADATA
    }


def data_start(path: str | Path) -> int:
    """Return where the header of such a file ends, in bytes from the file's start."""
    with opened(path, what="weights") as file:
        return _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")


def _tensor(name: str, found: Any, end: int) -> TensorInfo:
    where = f"tensor {name[:80]!r}"
    if not isinstance(found, dict) or found.keys() != {
        "dtype",
        "shape",
        "data_offsets",
    }:
        raise Malformed(f"{where} whose keys are not dtype, shape and data_offsets")
    dtype, shape, offsets = found["dtype"], found["shape"], found["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise Malformed(f"{where} of dtype {str(dtype)[:40]!r}")
    if not _are_sizes(shape) or len(shape) > _MOST_DIMS:
        raise Malformed(f"{where} of shape {str(shape)[:80]}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise Malformed(f"{where} at {str(offsets)[:80]}")
    num_bytes = math.prod(shape) * _BITS[dtype] / 8
    if not offsets[0] <= offsets[1] <= end or offsets[1] - offsets[0] != num_bytes:
        raise Malformed(
            f"{where} of {dtype} {shape} at bytes {offsets[0]} to {offsets[1]} of {end}"
        )
    return TensorInfo(dtype=dtype, shape=tuple(shape), start=offsets[0], end=offsets[1])


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 2**63 for value in values
    )
