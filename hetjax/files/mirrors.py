# SPDX-License-Identifier: Apache-2.0
"""What stands in this process for folders and files of another machine.

A worker's process is of one run: a name that its controller typed means what the
controller has under it, of which parts may come only when they are read. Owns which
names those are, and who brings the parts. Does not own bringing them
(`training/fetching/models.py`).
"""

from collections.abc import Callable, Mapping
from pathlib import Path

Bring = Callable[[int, int], None]  # bytes from one to another, unless they are here

_STANDS_FOR: dict[str, Path] = {}  # by name as it was typed
_PARTLY_HERE: dict[Path, Bring] = {}


def stand_for(name: str, here: Path, partly: Mapping[Path, Bring]) -> None:
    """Let the folder or file `here` be what is meant by a name from now on.

    Of the files `partly` here, parts are brought before they are read.
    """
    _STANDS_FOR[name] = here
    _PARTLY_HERE.update(partly)


def meant_by(name: str) -> Path | None:
    """What stands for this name; None: whatever has it on this machine."""
    return _STANDS_FOR.get(name)


def who_brings(path: Path) -> Bring | None:
    """What brings parts of the file before they are read; None: it is all here."""
    return _PARTLY_HERE.get(path)
