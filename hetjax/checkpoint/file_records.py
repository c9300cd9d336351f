# SPDX-License-Identifier: Apache-2.0
"""Defines records of files: size, checksum and, if manifests are signed, digest.

Owns making records and comparing files with them. A file can be checked and returned
from one read, so that the checked bytes are the bytes used. Does not own which files a
step has (`format.py`).
"""

import base64
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import google_crc32c

from hetjax.files.reading import Unreadable, opened

_DIGEST_BYTES = 32
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """A file as written; `crc32c` is the base64 text that object stores report too.

    If manifests are signed there is also a `digest`, which cannot be forged.
    """

    size_bytes: int
    crc32c: str
    digest: str = field(default="", compare=False)


def record_of_file(path: Path, *, with_digest: bool = False) -> FileRecord:
    """Return size and checksum of a file by reading it, and its digest if asked for."""
    checksum, size_bytes = google_crc32c.Checksum(), 0
    digest = blake2b(digest_size=_DIGEST_BYTES) if with_digest else None
    with opened(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum.update(chunk)
            if digest is not None:
                digest.update(chunk)
            size_bytes += len(chunk)
    return FileRecord(
        size_bytes=size_bytes,
        crc32c=_base64(checksum.digest()),
        digest="" if digest is None else digest.hexdigest(),
    )


def record_of_bytes(data: bytes, *, with_digest: bool = False) -> FileRecord:
    """Return size and checksum of a file with these bytes; its digest if asked for."""
    digest = blake2b(data, digest_size=_DIGEST_BYTES) if with_digest else None
    return FileRecord(
        size_bytes=len(data),
        crc32c=_base64(google_crc32c.Checksum(data).digest()),
        digest="" if digest is None else digest.hexdigest(),
    )


def size_mismatch(path: Path, expected: FileRecord) -> str | None:
    """Return how the file differs at a glance: missing, or of another size."""
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if size_bytes != expected.size_bytes:
        return f"{path} has {size_bytes} bytes, not {expected.size_bytes}"
    return None


def mismatch(path: Path, expected: FileRecord) -> str | None:
    """Return how the file differs from its record, after reading all of it."""
    if wrong := size_mismatch(path, expected):
        return wrong
    try:
        found = record_of_file(path, with_digest=bool(expected.digest))
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    except Unreadable as unreadable:
        return unreadable.got
    return _difference(path, found, expected)


class NotAsWritten(ValueError):
    """A file that differs from its record."""


def read_checked(path: Path, expected: FileRecord) -> bytes:
    """Return the file's bytes from a single read: exactly these bytes were checked.

    Raises NotAsWritten.
    """
    if wrong := size_mismatch(path, expected):
        raise NotAsWritten(wrong)
    try:
        with opened(path) as file:
            data = file.read(expected.size_bytes + 1)
    except OSError as error:
        raise NotAsWritten(f"{path} cannot be read ({error.strerror})") from error
    except Unreadable as unreadable:
        raise NotAsWritten(unreadable.got) from unreadable
    found = record_of_bytes(data, with_digest=bool(expected.digest))
    if wrong := _difference(path, found, expected):
        raise NotAsWritten(wrong)
    return data


def _difference(path: Path, found: FileRecord, expected: FileRecord) -> str | None:
    if found != expected:
        return f"{path} has crc32c {found.crc32c}, not {expected.crc32c}"
    if found.digest != expected.digest:
        return f"{path} is not what was signed"
    return None


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
