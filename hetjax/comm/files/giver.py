# SPDX-License-Identifier: Apache-2.0
"""Serves files of this machine, piece by piece, to workers of the run.

Serves only files that were registered before, under their registered names: a requested
name is never used as a path. Owns reading the files and the answers. Does not own which
files there are, nor the requests (`pieces.py`, `taker.py`).
"""

import os
import threading
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path

import numpy as np

from hetjax.comm.connections import SILENCE_S, Connection
from hetjax.comm.door import Listener
from hetjax.comm.files.pieces import (
    GIVEN,
    REFUSED,
    SAME,
    answer_key,
    read_piece,
    with_digest,
)
from hetjax.comm.frames import Key
from hetjax.comm.handshake import Ends
from hetjax.comm.tls import Tls

GIVER = "controller"  # the name by which workers dial it


class FileGiver:
    """Listens at `address`, which then has the port, until it is closed.

    `files` maps names to paths. Whoever knows the secret may read all of them.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        files: Mapping[str, Path],
        silence_s: float = SILENCE_S,
        tls: Tls | None = None,
    ) -> None:
        self._files, self._silence_s = dict(files), silence_s
        self._lock, self._links = threading.Lock(), dict[int, Connection]()
        self._numbers = count()
        self._closed = False
        self.given_bytes: dict[str, int] = {}  # without pieces that takers had
        self._listener = Listener(GIVER, address, secret, self._admit, tls)
        self.address = self._listener.address

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            self._closed = True
            links = [*self._links.values()]
        for link in links:
            link.close()

    def _admit(self, found: Ends, name: str, incarnation: int) -> None:
        with self._lock:
            if self._closed:
                return found.close()
            number = next(self._numbers)
            self._links[number] = Connection(
                found,
                name,
                partial(self._answer, number),
                partial(self._forget, number),
                self._silence_s,
            )

    def _forget(self, number: int, name: str, reason: str) -> None:
        with self._lock:
            self._links.pop(number, None)

    def _answer(self, link: int, name: str, key: Key, data: np.ndarray) -> None:
        """Answer a taker's requests in their order; runs on the link's thread.

        A taker has few requests open at once, which bounds what waits to be sent.
        """
        with self._lock:
            to = self._links.get(link)
        number = key[1]
        if to is None:
            return
        try:
            asked = read_piece(data)
            path = self._files[asked.name]
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                found = _read(file.fileno(), asked.start, min(asked.end, size))
        except (OSError, ValueError, KeyError) as error:
            why = np.frombuffer(f"{type(error).__name__}: {error}".encode(), np.uint8)
            return to.send(answer_key(REFUSED, number), [why])
        if asked.have and asked.have == sha256(found).hexdigest():
            return to.send(answer_key(SAME, number, size), [])
        with self._lock:
            before = self.given_bytes.get(asked.name, 0)
            self.given_bytes[asked.name] = before + len(found)
        to.send(answer_key(GIVEN, number, size), with_digest(found))


def _read(descriptor: int, start: int, end: int) -> bytes:
    found = bytearray()
    while (left := end - start - len(found)) > 0:
        part = os.pread(descriptor, left, start + len(found))
        if not part:
            raise OSError(f"the file ends at byte {start + len(found)}")
        found += part
    return bytes(found)
