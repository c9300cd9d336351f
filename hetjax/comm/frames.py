# SPDX-License-Identifier: Apache-2.0
"""Frames messages on a stream: a header and bytes, with codes if there is a key.

    key (six numbers), length of the bytes | code | bytes | code

Owns this form, and the rule that only what the other side sent is accepted. A code is a
keyed BLAKE2b of the number of earlier messages and of the header; the code after the
bytes also covers the digests of their pieces, which other threads compute meanwhile. So
a changed, omitted, repeated or swapped frame ends the stream, and no length is accepted
unproven. Does not own the keys (`handshake.py`) nor threads (`connections.py`).
"""

import hmac
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from hashlib import blake2b

import numpy as np

from hetjax.comm.tls import Stream

Key = tuple[int, int, int, int, int, int]

_HEADER = struct.Struct("<6IQ")
_COUNT = struct.Struct("<Q")
_CODE_BYTES = 16
_CHUNK_BYTES = 1 << 20  # small enough to be still in the caches when it is sent
_SMALL_BYTES, _NUM_THREADS = 64 << 10, min(8, os.cpu_count() or 1)
_ALIGNMENT = 64  # bytes: JAX adopts such host arrays without a copy
_MOST_VIEWS = 64  # in one call: a limit of the system


class ForgedFrame(ConnectionError):
    """The bytes received are not what the other side sent, or not in its order."""


class FrameWriter:
    """Writes messages, with codes if there is a key; for one thread only."""

    def __init__(self, found: Stream, key: bytes | None) -> None:
        self._socket, self._key, self._count = found, key, 0

    def write(self, key: Key, parts: Sequence[np.ndarray]) -> None:
        """Write the parts, concatenated, as one message."""
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
        pieces = [*_pieces(views)]
        digests = [_digest(key, piece) for piece in pieces]
        for piece, digest in zip(pieces, digests, strict=True):
            waiting += piece
            if not digest.done() or piece is not pieces[-1]:
                _write(self._socket, waiting)
                waiting = []
        if views:
            waiting.append(memoryview(_code_of(of_bytes, digests)))
        _write(self._socket, waiting)


class FrameReader:
    """Reads messages, and checks their codes if there is a key; for one thread only."""

    def __init__(self, found: Stream, key: bytes | None) -> None:
        self._socket, self._key, self._count = found, key, 0
        self._header = bytearray(_HEADER.size)

    def read(self) -> tuple[Key, np.ndarray]:
        """Return the next message; raise OSError, or ForgedFrame for a wrong code."""
        _fill(self._socket, memoryview(self._header))
        if self._key is None:
            key, data = self._parsed()
            _fill(self._socket, data.data)
            return key, data
        of_header, of_bytes = _codes(self._key, self._count, self._header)
        self._count += 1
        self._check(of_header.digest())
        key, data = self._parsed()
        if len(data):
            digests = []
            for piece in _pieces([data.data]):
                _fill(self._socket, piece[0])
                digests.append(_digest(self._key, piece))
            self._check(_code_of(of_bytes, digests))
        return key, data

    def _parsed(self) -> tuple[Key, np.ndarray]:
        *numbers, size = _HEADER.unpack(self._header)
        key: Key = tuple(numbers)
        return key, _aligned(size)

    def _check(self, expected: bytes) -> None:
        code = bytearray(_CODE_BYTES)
        _fill(self._socket, memoryview(code))
        if not hmac.compare_digest(code, expected):
            raise ForgedFrame("the received bytes differ from those sent")


def _codes(
    key: bytes, count: int, header: bytes | bytearray
) -> tuple[blake2b, blake2b]:
    """Return the hashes for the codes of this header and of the bytes after it."""
    data = _COUNT.pack(count) + header
    size = _CODE_BYTES
    return (
        blake2b(data, key=key, digest_size=size, person=b"header"),
        blake2b(data, key=key, digest_size=size, person=b"bytes"),
    )


def _digest(key: bytes, piece: Sequence[memoryview]) -> Future[bytes]:
    """Return the digest of a piece; small ones are not worth another thread."""
    if sum(map(len, piece)) >= _SMALL_BYTES:
        return _threads().submit(_piece_digest, key, piece)
    done: Future[bytes] = Future()
    done.set_result(_piece_digest(key, piece))
    return done


def _piece_digest(key: bytes, piece: Sequence[memoryview]) -> bytes:
    """Return the digest of a piece; BLAKE2b releases the GIL except for tiny views."""
    digest = blake2b(key=key, digest_size=_CODE_BYTES, person=b"piece")
    for view in piece:
        digest.update(view)
    return digest.digest()


def _code_of(of_bytes: blake2b, digests: Sequence[Future[bytes]]) -> bytes:
    """Return the code of all pieces; other cuts of the bytes give another code."""
    for digest in digests:
        of_bytes.update(digest.result())
    return of_bytes.digest()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="codes")


def _pieces(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Yield pieces of the bytes that do not depend on how they are cut into views."""
    piece, left = list[memoryview](), _CHUNK_BYTES
    for view in views:
        while len(view):
            part, view = view[:left], view[left:]
            piece.append(part)
            left -= len(part)
            if not left:
                yield piece
                piece, left = [], _CHUNK_BYTES
    if piece:
        yield piece


def _write(found: Stream, views: list[memoryview]) -> None:
    """Write all views, the header together with what follows, to save a wake-up."""
    while views:
        count = found.sendmsg(views[:_MOST_VIEWS])
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views:
            views[0] = views[0][count:]


def _fill(found: Stream, view: memoryview) -> None:
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
