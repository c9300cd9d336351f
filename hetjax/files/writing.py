# SPDX-License-Identifier: Apache-2.0
"""Text files written whole or not at all, and errors that name them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Let an OSError from inside name the file: one from writing does not by itself."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_whole(path: str | Path, text: str, mode: int = 0o666) -> None:
    """Write a file whole or not at all; an OSError names it.

    `mode` says who may read and write it, less what the umask takes away.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            draft.unlink(missing_ok=True)
            opened = os.open(draft, _NEW, mode)
            with os.fdopen(opened, "w", encoding="utf-8") as file:
                file.write(text)
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
