# SPDX-License-Identifier: Apache-2.0
"""Maps names of a controller's folders and files to a worker's copies of them.

A worker's process serves one run: a name that was typed at its controller means the
controller's folder or file. A copy may be partial: the worker fetches other parts when
it reads them. Owns which names have copies, and which function fetches parts. Does not
own fetching (`training/fetching/models.py`).
"""

from collections.abc import Callable, Mapping
from pathlib import Path

Bring = Callable[[int, int], None]  # fetches bytes (start, end), unless they are here

_STANDS_FOR: dict[str, Path] = {}  # by name as typed
_PARTLY_HERE: dict[Path, Bring] = {}


def stand_for(name: str, here: Path, partly: Mapping[Path, Bring]) -> None:
    """Let the folder or file `here` stand for a name from now on.

    `partly` has a function for each partial file, which fetches parts before reading.
    """
    _STANDS_FOR[name] = here
    _PARTLY_HERE.update(partly)


def meant_by(name: str) -> Path | None:
    """Return the local copy that stands for this name, or None if there is none."""
    return _STANDS_FOR.get(name)


def who_brings(path: Path) -> Bring | None:
    """Return the function that fetches parts of the file; None: the file is whole."""
    return _PARTLY_HERE.get(path)
