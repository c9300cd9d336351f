# SPDX-License-Identifier: Apache-2.0
"""Messages on a stream: each a header and bytes, with codes where they have keys.

    key (six numbers), length of the bytes | code | bytes | code

Owns this form, and that nothing is believed that the other side did not send: a code is
a keyed BLAKE2b of how many messages came before, of the header, and, after the bytes,
of these. So frames that are changed, left out, repeated or swapped end the stream, and
no length is believed unproven. Does not own the keys (`handshake.py`) nor threads
(`connections.py`).
"""

import hmac
import socket
import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np

Key = tuple[int, int, int, int, int, int]

_HEADER = struct.Struct("<6IQ")
_COUNT = struct.Struct("<Q")
_CODE_BYTES = 16
_CHUNK_BYTES = 1 << 20  # so much is in the caches when it is sent
_ALIGNMENT = 64  # bytes: JAX takes over such host arrays without a copy
_MOST_VIEWS = 64  # in one call, of what the system takes


class ForgedFrame(ConnectionError):
    """What came is not what the other side sent, or not in its order."""


class FrameWriter:
    """Writes messages, with codes if there is a key; for one thread."""

    def __init__(self, found: socket.socket, key: bytes | None) -> None:
        self._socket, self._key, self._count = found, key, 0

    def write(self, key: Key, parts: Sequence[np.ndarray]) -> None:
        """Write the parts one after the other as one message."""
        views = [_bytes_of(part) for part in parts if part.size]
        header = _HEADER.pack(*key, sum(map(len, views)))
        if self._key is None:
            return _write(self._socket, [memoryview(header), *views])
        self._write_coded(self._key, header, views)

    def _write_coded(
        self, key: bytes, header: bytes, views: Sequence[memoryview]
    ) -> None:
        of_header, of_bytes = _codes(key, self._count, header)
        self._count += 1
        waiting = [memoryview(header), memoryview(of_header.digest())]
        for piece in _pieces(views):
            of_bytes.update(piece)
            waiting.append(piece)
            if len(piece) == _CHUNK_BYTES:
                _write(self._socket, waiting)
                waiting = []
        if views:
            waiting.append(memoryview(of_bytes.digest()))
        _write(self._socket, waiting)


class FrameReader:
    """Reads messages, and checks their codes if there is a key; for one thread."""

    def __init__(self, found: socket.socket, key: bytes | None) -> None:
        self._socket, self._key, self._count = found, key, 0
        self._header = bytearray(_HEADER.size)

    def read(self) -> tuple[Key, np.ndarray]:
        """The next message; raises OSError, ForgedFrame for one that cannot be."""
        _fill(self._socket, memoryview(self._header))
        if self._key is None:
            key, data = self._parsed()
            _fill(self._socket, data.data)
            return key, data
        of_header, of_bytes = _codes(self._key, self._count, self._header)
        self._count += 1
        self._check(of_header)
        key, data = self._parsed()
        if len(data):
            for piece in _pieces([data.data]):
                _fill(self._socket, piece)
                of_bytes.update(piece)
            self._check(of_bytes)
        return key, data

    def _parsed(self) -> tuple[Key, np.ndarray]:
        *numbers, size = _HEADER.unpack(self._header)
        key: Key = tuple(numbers)
        return key, _aligned(size)

    def _check(self, expected: blake2b) -> None:
        code = bytearray(_CODE_BYTES)
        _fill(self._socket, memoryview(code))
        if not hmac.compare_digest(code, expected.digest()):
            raise ForgedFrame("something else has come than what it sent")


def _codes(
    key: bytes, count: int, header: bytes | bytearray
) -> tuple[blake2b, blake2b]:
    """What makes the codes of this header, and of the bytes that will follow it."""
    data = _COUNT.pack(count) + header
    size = _CODE_BYTES
    return (
        blake2b(data, key=key, digest_size=size, person=b"header"),
        blake2b(data, key=key, digest_size=size, person=b"bytes"),
    )


def _pieces(views: Sequence[memoryview]) -> Iterator[memoryview]:
    for view in views:
        for start in range(0, len(view), _CHUNK_BYTES):
            yield view[start : start + _CHUNK_BYTES]


def _write(found: socket.socket, views: list[memoryview]) -> None:
    """Write all, the header together with what follows: it wakes nobody for itself."""
    while views:
        count = found.sendmsg(views[:_MOST_VIEWS])
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views:
            views[0] = views[0][count:]


def _fill(found: socket.socket, view: memoryview) -> None:
    while len(view):
        count = found.recv_into(view, 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionError("end of stream")
        view = view[count:]


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _aligned(size: int) -> np.ndarray:
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % _ALIGNMENT
    return raw[start : start + size]
