# SPDX-License-Identifier: Apache-2.0
"""A file of safetensors written one tensor at a time.

`safetensors.save_file` wants all tensors of a file at once, and copies them. A header
tells where each will be, so that it can be written as soon as it is made.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ALIGNED_BYTES = 8  # of the header; spaces fill it up


def write_tensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    values: Iterable[tuple[str, np.ndarray]],
) -> int:
    """Write tensors of one dtype, whose values come in any order; return their bytes.

    No more than one value is held at a time.
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
        for name, value in values:
            assert (value.shape, value.dtype) == (shapes[name], dtype), name
            file.seek(first + places.pop(name))
            value.tofile(file)
    assert not places, f"not written: {sorted(places)}"
    return end
