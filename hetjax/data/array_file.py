# SPDX-License-Identifier: Apache-2.0
"""Writes an .npy file of one dim piece by piece.

Owns its header and errors of the disk. Does not own which files there are
(`building.py`).
"""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np

_FORMAT = np.lib.format


class ArrayFile:
    """An .npy file of one dim that grows, equal byte for byte to that of `np.save`."""

    def __init__(self, path: Path, dtype: Any) -> None:
        self._path, self._dtype, self.length = path, np.dtype(dtype), 0

    def __enter__(self) -> "ArrayFile":
        self._file = self._path.open("wb", buffering=0)
        self._header_bytes = self._write_header()
        return self

    def append(self, array: np.ndarray) -> None:
        assert array.dtype == self._dtype, (array.dtype, self._dtype)
        self._write(array.tobytes())
        self.length += len(array)

    def __exit__(self, *raised: object) -> None:
        try:
            self._file.seek(0)
            assert self._write_header() == self._header_bytes
        finally:
            self._file.close()

    def _write_header(self) -> int:
        header = {
            "descr": _FORMAT.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self.length,),
        }
        _FORMAT.write_array_header_1_0(self._file, header)
        return self._file.tell()

    def _write(self, data: bytes) -> None:
        try:
            if self._file.write(data) == len(data):
                return
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
