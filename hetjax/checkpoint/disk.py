# SPDX-License-Identifier: Apache-2.0
"""What is on the disk of one worker's part of a step: whole, or what a crash left.

Owns telling the two apart, and removing without ever leaving half a step. Does not own
writing (`save.py`, `copies.py`).
"""

import shutil
import time
from contextlib import suppress
from pathlib import Path

from hetjax.checkpoint.format import MANIFEST
from hetjax.checkpoint.manifest import Manifest, from_text, size_flaw

_NUM_REMOVALS, _LATE_WRITE_S = 20, 0.1


def committed(own: Path) -> Manifest | None:
    """The manifest in place; None where there is none, or a damaged one."""
    try:
        return from_text((own / MANIFEST).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def is_complete(own: Path) -> bool:
    """Whether all files of the manifest are there, in their size."""
    manifest = committed(own)
    return manifest is not None and not any(
        size_flaw(own / path, expected) for path, expected in manifest.files.items()
    )


def remove_uncommitted(own: Path) -> None:
    """Remove all that no manifest vouches for."""
    manifest = committed(own)
    if manifest is None:
        return remove(own)
    for path in own.iterdir():
        if path.name not in (MANIFEST, manifest.state):
            is_folder = path.is_dir() and not path.is_symlink()
            shutil.rmtree(path) if is_folder else path.unlink()


def remove_failed(own: Path) -> None:
    """Remove a failed save, while its other writes may go on for a moment.

    What should stay all the same is removed at the next save.
    """
    for _ in range(_NUM_REMOVALS):
        with suppress(OSError):
            remove_uncommitted(own)
        time.sleep(_LATE_WRITE_S)
        if not own.exists() or is_complete(own):
            return


def remove(own: Path) -> None:
    """Remove one worker's part of a step, the manifest first: never half a step."""
    if not own.is_dir():
        return
    (own / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(own)
    with suppress(OSError):  # parts of other workers stay
        own.parent.rmdir()


def make(own: Path) -> None:
    """Make the folder of a part, while other workers may remove theirs of the step."""
    for _ in range(_NUM_REMOVALS):
        with suppress(FileNotFoundError):  # the step's folder has just gone again
            return own.mkdir(parents=True, exist_ok=True)
    own.mkdir(parents=True, exist_ok=True)
