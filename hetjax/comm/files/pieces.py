# SPDX-License-Identifier: Apache-2.0
"""What is said of files between who gives them and who takes them.

    taker -> ASK, number: {"name": .., "start": .., "end": .., "have": SHA-256 or ""}
    giver -> GIVEN, number, size of the file: SHA-256 of the piece, its bytes
          or SAME, number, size of the file: what the taker has is what the giver has
          or REFUSED, number: why, in words

Owns these words and their limits. Does not own who says them (`giver.py`, `taker.py`).
"""

import json
from dataclasses import asdict, dataclass
from hashlib import sha256

import numpy as np

from hetjax.comm.frames import Key
from hetjax.files.parsing import json_value
from hetjax.files.tables import read_fields

ASK, GIVEN, SAME, REFUSED = range(4)  # what a message is, first in its key
PIECE_BYTES = 4 << 20  # at most
_WORD = 1 << 32
_DIGEST_BYTES = sha256().digest_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Bytes `start` to `end` of a file by name, of which the taker may `have` some with
    this SHA-256 (hexadecimal digits; empty: none)."""

    name: str
    start: int
    end: int
    have: str = ""

    def message(self) -> np.ndarray:
        return np.frombuffer(json.dumps(asdict(self)).encode(), np.uint8)


def read_piece(data: np.ndarray) -> Piece:
    """Inverse of `Piece.message`; ValueError for what is none, or is too long."""
    fields = json_value(data.tobytes())
    found = Piece(**read_fields(fields, Piece, where="what is asked for"))
    if not 0 <= found.start <= found.end <= found.start + PIECE_BYTES:
        raise ValueError(f"bytes {found.start} to {found.end} are asked for at once")
    return found


def answer_key(kind: int, number: int, size: int = 0) -> Key:
    """The key of an answer; `size` is that of the whole file, in bytes."""
    return kind, number, size // _WORD, size % _WORD, 0, 0


def size_in(key: Key) -> int:
    """The size of the whole file that an answer tells."""
    return key[2] * _WORD + key[3]


def with_digest(data: bytes) -> list[np.ndarray]:
    """The parts of a message with these bytes."""
    return [
        np.frombuffer(part, np.uint8) for part in (sha256(data).digest(), data) if part
    ]


def checked(message: np.ndarray) -> bytes:
    """The bytes of such a message; ValueError if they are not what was sent."""
    data = message[_DIGEST_BYTES:].tobytes()
    if sha256(data).digest() != message[:_DIGEST_BYTES].tobytes():
        raise ValueError("other bytes have come than were sent")
    return data
