# SPDX-License-Identifier: Apache-2.0
"""Writes text files whole or not at all, with errors that name them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_OTHERS = 0o077  # modes of the group and of all others


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Make an OSError from inside name the file, which an error of writing does not."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_whole(path: str | Path, text: str, mode: int = 0o666) -> None:
    """Write a file whole or not at all; an OSError names it.

    `mode` says who may read and write it, less what the umask takes away. A device or a
    pipe (/dev/null, `>(jq .)`) is written into and stays what it is; a symbolic link
    stays, and the file that it names is replaced. But if `mode` admits only the owner,
    the path itself is replaced: another user may have put a link or a pipe there.
    """
    path = Path(path)
    with naming(path):
        if not mode & _OTHERS:
            _replace(path, text, mode)
        elif path.exists() and not (path.is_file() or path.is_dir()):
            _write_into(path, text)
        else:
            _replace(Path(os.path.realpath(path)), text, mode)


def _write_into(path: Path, text: str) -> None:
    opened = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # ENXIO if a FIFO has no reader
    os.set_blocking(opened, True)
    with os.fdopen(opened, "w", encoding="utf-8") as file:
        file.write(text)


def _replace(path: Path, text: str, mode: int) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, _NEW, mode), "w", encoding="utf-8") as file:
            file.write(text)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
