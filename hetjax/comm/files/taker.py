# SPDX-License-Identifier: Apache-2.0
"""Fetches files of another machine, piece by piece, and checks each by its SHA-256.

Owns the connection and the number of pieces under way. Does not own the use of the
pieces (`training/fetching/`), nor the messages (`pieces.py`).

The bandwidth of the path bounds the time: several requests are always open, so that no
round trip is waited for, and each piece is hashed while the next one arrives.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from types import TracebackType
from typing import Self

import numpy as np

from hetjax.comm.connections import SILENCE_S, Connection
from hetjax.comm.files.giver import GIVER
from hetjax.comm.files.pieces import (
    ASK,
    GIVEN,
    PIECE_BYTES,
    REFUSED,
    SAME,
    Piece,
    checked,
    size_in,
)
from hetjax.comm.frames import Key
from hetjax.comm.handshake import dial
from hetjax.comm.tls import Tls

_UNDER_WAY = 4  # pieces
_PIECE_S = 300.0  # until a piece is given up, though its giver is alive

# bytes that this machine already has of a file, from start to end; None: nothing
Have = Callable[[int, int], bytes | None]


class NotGiven(OSError):
    """The other machine does not give the requested bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GiverPlace:
    """The address of the giver, and the name and secret of the worker that dials it."""

    address: str
    own: str
    secret: bytes
    silence_s: float = SILENCE_S
    incarnation: int = 0
    tls: Tls | None = None


class FileTaker:
    """A connection to a giver of files, used in a `with` block; raises OSError."""

    def __init__(self, at: GiverPlace) -> None:
        self._changed = threading.Condition()
        self._answers: dict[int, tuple[Key, np.ndarray]] = {}
        self._lost, self._numbers = "", count()
        ends = dial(at.address, at.own, GIVER, at.secret, at.incarnation, tls=at.tls)
        self._link = Connection(ends, GIVER, self._on_answer, self._lose, at.silence_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._link.close()

    def size(self, name: str) -> int:
        """Return how many bytes the file of that name has."""
        key, _ = self._answer(self._ask(name, 0, 0, ""))
        return size_in(key)

    def read(self, name: str, start: int, end: int) -> bytes:
        """Return these bytes of the file of that name, up to its end."""
        return b"".join(data for _, data in self.pieces(name, start, end))

    def pieces(
        self, name: str, start: int, end: int, have: Have = lambda start, end: None
    ) -> Iterator[tuple[int, bytes]]:
        """Yield these bytes piece by piece, each with its start.

        A piece that is equal on both machines, as `have` finds, is not sent again.
        """
        asked = deque[tuple[int, int, bytes | None]]()
        bounds = iter(range(start, end, PIECE_BYTES))
        while True:
            while len(asked) < _UNDER_WAY and (at := next(bounds, None)) is not None:
                to = min(end, at + PIECE_BYTES)
                own = have(at, to)
                digest = "" if own is None else sha256(own).hexdigest()
                asked.append((self._ask(name, at, to, digest), at, own))
            if not asked:
                return
            number, at, own = asked.popleft()
            key, message = self._answer(number)
            if key[0] == SAME and own is not None:
                yield at, own
            elif key[0] == GIVEN:
                yield at, _checked(name, message)
            else:
                raise NotGiven(f"{name}: an unexpected answer")

    def _ask(self, name: str, start: int, end: int, have: str) -> int:
        number = next(self._numbers)
        piece = Piece(name=name, start=start, end=end, have=have)
        self._link.send((ASK, number, 0, 0, 0, 0), [piece.message()])
        return number

    def _answer(self, number: int) -> tuple[Key, np.ndarray]:
        with self._changed:
            is_there = lambda: number in self._answers or self._lost  # noqa: E731
            if not self._changed.wait_for(is_there, _PIECE_S):
                raise NotGiven(f"nothing arrived for {_PIECE_S:g} s")
            if number not in self._answers:
                raise NotGiven(f"the controller {self._lost}")
            key, data = self._answers.pop(number)
        if key[0] == REFUSED:
            raise NotGiven(data.tobytes().decode(errors="replace")[:400])
        return key, data

    def _on_answer(self, peer: str, key: Key, data: np.ndarray) -> None:
        with self._changed:
            self._answers[key[1]] = key, data
            self._changed.notify_all()

    def _lose(self, peer: str, reason: str) -> None:
        with self._changed:
            self._lost = reason
            self._changed.notify_all()


def _checked(name: str, message: np.ndarray) -> bytes:
    try:
        return checked(message)
    except ValueError as error:
        raise NotGiven(f"{name}: {error}") from error
