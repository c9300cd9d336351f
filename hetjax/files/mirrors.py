# SPDX-License-Identifier: Apache-2.0
"""Maps names to what stands in this process for folders and files of another machine.

A worker's process serves one run: a name that was typed at its controller means the
controller's folder or file. Parts of it may come only when they are read. Owns which
names these are, and which function brings the parts. Does not own bringing them
(`training/fetching/models.py`).
"""

from collections.abc import Callable, Mapping
from pathlib import Path

Bring = Callable[[int, int], None]  # brings bytes (start, end), unless they are here

_STANDS_FOR: dict[str, Path] = {}  # by name as typed
_PARTLY_HERE: dict[Path, Bring] = {}


def stand_for(name: str, here: Path, partly: Mapping[Path, Bring]) -> None:
    """Let the folder or file `here` stand for a name from now on.

    For files that are `partly` here, a function brings parts before they are read.
    """
    _STANDS_FOR[name] = here
    _PARTLY_HERE.update(partly)


def meant_by(name: str) -> Path | None:
    """Return what stands for this name; None: the file of that name here."""
    return _STANDS_FOR.get(name)


def who_brings(path: Path) -> Bring | None:
    """Return what brings parts of the file before reading; None: it is all here."""
    return _PARTLY_HERE.get(path)
