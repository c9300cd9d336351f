# SPDX-License-Identifier: Apache-2.0
"""Defines the messages between the giver and the taker of files.

    taker -> ASK, number: {"name": .., "start": .., "end": .., "have": SHA-256 or ""}
    giver -> GIVEN, number, size of the file: SHA-256 of the piece, its bytes
          or SAME, number, size of the file: the taker already has these bytes
          or REFUSED, number: the reason, as text

Owns these messages and their limits. Does not own who sends them (`giver.py`,
`taker.py`).
"""

import json
from dataclasses import asdict, dataclass
from hashlib import sha256

import numpy as np

from hetjax.comm.frames import Key
from hetjax.files.parsing import json_value
from hetjax.files.tables import read_fields

ASK, GIVEN, SAME, REFUSED = range(4)  # kind of message, first in its key
PIECE_BYTES = 4 << 20  # at most
_WORD = 1 << 32
_DIGEST_BYTES = sha256().digest_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Bytes `start` to `end` of the file `name`.

    `have` is the SHA-256 (hexadecimal digits) of the taker's bytes there; empty: none.
    """

    name: str
    start: int
    end: int
    have: str = ""

    def message(self) -> np.ndarray:
        return np.frombuffer(json.dumps(asdict(self)).encode(), np.uint8)


def read_piece(data: np.ndarray) -> Piece:
    """Inverse of `Piece.message`; raise ValueError if it is no piece or is too long."""
    fields = json_value(data.tobytes())
    found = Piece(**read_fields(fields, Piece, where="the request"))
    if not 0 <= found.start <= found.end <= found.start + PIECE_BYTES:
        raise ValueError(f"bytes {found.start} to {found.end} requested at once")
    return found


def answer_key(kind: int, number: int, size: int = 0) -> Key:
    """Return the key of an answer; `size` is that of the whole file, in bytes."""
    return kind, number, size // _WORD, size % _WORD, 0, 0


def size_in(key: Key) -> int:
    """Return the size of the whole file from the key of an answer."""
    return key[2] * _WORD + key[3]


def with_digest(data: bytes) -> list[np.ndarray]:
    """Return the parts of a message that carries these bytes and their digest."""
    return [
        np.frombuffer(part, np.uint8) for part in (sha256(data).digest(), data) if part
    ]


def checked(message: np.ndarray) -> bytes:
    """Return the bytes of such a message; raise ValueError if the digest differs."""
    data = message[_DIGEST_BYTES:].tobytes()
    if sha256(data).digest() != message[:_DIGEST_BYTES].tobytes():
        raise ValueError("the received bytes differ from those sent")
    return data
