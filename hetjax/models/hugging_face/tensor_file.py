# SPDX-License-Identifier: Apache-2.0
"""Writes a file of safetensors one tensor at a time, each some rows at a time.

`safetensors.save_file` needs all tensors of a file at once, and copies them. Here the
header fixes the place of each tensor, which can be written as soon as it is made. Only
the rows being written have a second copy, in the file's order and precision.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ALIGNED_BYTES = 8  # alignment of the header, padded with spaces
_ROWS_BYTES = 2**20  # converted at once, unless one row is larger


def write_tensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    values: Iterator[tuple[str, np.ndarray]],
) -> int:
    """Write tensors in one dtype; return how many bytes they take.

    `values` may come in any order, with another dtype and any memory layout (views of
    other arrays). None is held once the next is requested.
    """
    places: dict[str, int] = {}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        places[name], begin = end, end
        end += int(np.prod(shape)) * dtype.itemsize
        said = {"dtype": _DTYPES[dtype.name], "shape": list(shape)}
        header[name] = {**said, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        first = file.tell()
        while each := next(values, None):
            assert each[1].shape == shapes[each[0]], each[0]
            file.seek(first + places.pop(each[0]))
            _write_rows(file, each[1], dtype)
            del each
    assert not places, f"not written: {sorted(places)}"
    return end


def _write_rows(file: BinaryIO, value: np.ndarray, dtype: np.dtype) -> None:
    row_bytes = max(1, int(np.prod(value.shape[1:])) * dtype.itemsize)
    num_rows = max(1, _ROWS_BYTES // row_bytes)
    for start in range(0, len(value), num_rows):
        np.ascontiguousarray(value[start : start + num_rows], dtype).tofile(file)
