# SPDX-License-Identifier: Apache-2.0
"""Defines how S3 holds a file in pieces: their names, their list, and metadata.

Owns the metadata of objects and the form of an index. Does not own sending and
receiving them (`s3.py`).
"""

import base64
import json
from collections.abc import Iterable, Mapping
from typing import Any

from hetjax.checkpoint.file_records import FileRecord, record_of_bytes
from hetjax.checkpoint.stores.store import CorruptData, text_of
from hetjax.files.parsing import json_value
from hetjax.files.tables import as_kind

PIECE_BYTES = 8 << 20  # size of a piece of a larger file
INDEX = "index"  # metadata of indexes only: the crc32c of the list
_CRC32C, _SIZE = "crc32c", "size"  # of the file that the object stands for


def metadata(record: FileRecord) -> dict[str, str]:
    """Return an object's metadata, so that it can be checked without a download."""
    return {_CRC32C: record.crc32c, _SIZE: str(record.size_bytes)}


def record_said(metadata: Mapping[str, str]) -> FileRecord | None:
    """Return the record in an object's metadata; None if another program wrote it."""
    size, crc32c = metadata.get(_SIZE, ""), metadata.get(_CRC32C)
    if crc32c is None or not size.isdecimal():
        return None
    return FileRecord(size_bytes=int(size), crc32c=crc32c)


def index_of(pieces: Iterable[FileRecord]) -> bytes:
    """Return the content of an index, which lists pieces in order."""
    return json.dumps([[one.size_bytes, one.crc32c] for one in pieces]).encode()


def piece_name(name: str, number: int, piece: FileRecord) -> str:
    """Return the name of a piece; a piece with other content has another name.

    >>> piece_name("a/0", 3, FileRecord(size_bytes=9, crc32c="4waSgw=="))
    'a/0.pieces/00003-e3069283'
    """
    return f"{name}.pieces/{number:05d}-{base64.b64decode(piece.crc32c).hex()}"


def pieces_of(index: bytes, crc32c: str) -> list[FileRecord]:
    """Return the pieces that an index lists; CorruptData if it is not as written."""
    if record_of_bytes(index).crc32c != crc32c:
        raise CorruptData(f"its list of pieces is not the one written: crc32c {crc32c}")
    try:
        listed = as_kind(json_value(text_of(index, "the list")), "a list", where="it")
        return [_piece(*one) for one in listed]
    except (TypeError, ValueError) as error:
        raise CorruptData(f"its list of pieces cannot be used: {error}") from error


def _piece(size_bytes: Any, crc32c: Any) -> FileRecord:
    size_bytes = as_kind(size_bytes, "an integer", where="size")
    crc32c = as_kind(crc32c, "a string", where=_CRC32C)
    base64.b64decode(crc32c, validate=True)
    return FileRecord(size_bytes=size_bytes, crc32c=crc32c)
