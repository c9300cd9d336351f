# SPDX-License-Identifier: Apache-2.0
"""Text files written whole or not at all, and errors that name them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Let an OSError from inside name the file: one from writing does not by itself."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_whole(path: str | Path, text: str) -> None:
    """Write a file whole or not at all; an OSError names it."""
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
