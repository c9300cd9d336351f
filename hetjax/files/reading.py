# SPDX-License-Identifier: Apache-2.0
"""Reads bytes and text of files that may come from other people, with limits.

Owns which files are read at all (plain files: a FIFO or a device may never end), how
much of them, and their encoding. Does not own what the text means: JSON and TOML
(`parsing.py`), keys and types (`tables.py`).
"""

import codecs
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from hetjax.errors import BadInput

MOST_BYTES = 64 << 20  # of a file that is read whole, unless the caller sets another
_CHUNK_BYTES = 1 << 20
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
_MARKS = (  # the longer first: the mark of UTF-32 begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


class Unreadable(BadInput):
    """A file of a wrong kind, a wrong size or a wrong encoding."""


@contextmanager
def opened(path: str | Path, *, what: str = "file") -> Iterator[BufferedReader]:
    """Open a plain file for reading; never waits for the writer of a FIFO.

    Raises Unreadable for a FIFO, a socket, a device, a folder or a link to itself, and
    OSError as `open` does.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise _of_a_kind("a link that leads to itself", path, what) from error
    _check_plain(mode, path, what)
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        _check_plain(os.fstat(descriptor).st_mode, path, what)  # may be another now
        yield file


def read_bytes(
    path: str | Path, *, what: str = "file", most_bytes: int = MOST_BYTES
) -> bytes:
    """Return all bytes of a plain file.

    Raises Unreadable for another kind of file and for one that is too large, and
    OSError as `open` does.
    """
    with opened(path, what=what) as file:
        data = bytearray()
        while chunk := file.read(min(_CHUNK_BYTES, most_bytes + 1 - len(data))):
            data += chunk
            if len(data) > most_bytes:
                raise _too_large(path, what, most_bytes)
    return bytes(data)


def read_text(
    path: str | Path, *, what: str = "file", most_bytes: int = MOST_BYTES
) -> str:
    """Return the UTF-8 text of a plain file; BadInput if it cannot be read."""
    try:
        data = read_bytes(path, what=what, most_bytes=most_bytes)
    except (OSError, ValueError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(
            got=f"{what} {str(path)!r}: {getattr(error, 'strerror', None) or error}",
            allowed="the path of a file that can be read",
            fix=f"check the path of the {what}",
        ) from error
    return decoded(data, f"{what} {str(path)!r}")


def decoded(data: bytes, where: str) -> str:
    """Return the text of UTF-8 bytes, without a byte-order mark.

    Raises Unreadable, which names UTF-16 and UTF-32.

    >>> decoded(b"\\xef\\xbb\\xbf[]", "list")
    '[]'
    """
    if encoding := _other_encoding(data):
        raise Unreadable(
            got=f"{where} in {encoding}",
            allowed="text in UTF-8",
            fix=f"save it as UTF-8: iconv -f {encoding} -t UTF-8 OLD > NEW",
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(
            got=f"{where}: not UTF-8 text at byte {error.start}",
            allowed="text in UTF-8",
            fix="save it as UTF-8 text, e.g. iconv -f LATIN1 -t UTF-8 OLD > NEW",
        ) from error


def _other_encoding(data: bytes) -> str | None:
    """Return UTF-16 or UTF-32, by its mark or by zeros beside a first ASCII letter."""
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return encoding
    zeros = [byte == 0 for byte in data[:4]]
    if zeros in ([True, True, True, False], [False, True, True, True]):
        return "UTF-32"
    if zeros in ([True, False, True, False], [False, True, False, True]):
        return "UTF-16BE" if zeros[0] else "UTF-16LE"
    return None


def _check_plain(mode: int, path: str | Path, what: str) -> None:
    kind = _KINDS.get(stat.S_IFMT(mode))
    if kind is not None:
        raise _of_a_kind(kind, path, what)


def _of_a_kind(kind: str, path: str | Path, what: str) -> Unreadable:
    return Unreadable(
        got=f"{what} {str(path)!r}: {kind}",
        allowed="a plain file",
        fix="name a plain file; save the output of a pipe with: cat PIPE > FILE",
    )


def _too_large(path: str | Path, what: str, most_bytes: int) -> Unreadable:
    return Unreadable(
        got=f"{what} {str(path)!r} with more than {most_bytes:,} bytes",
        allowed=f"up to {most_bytes:,} bytes",
        fix=f"check that it is the {what}",
    )
