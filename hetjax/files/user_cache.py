# SPDX-License-Identifier: Apache-2.0
"""Finds the folder in which hetjax keeps files for a user between runs.

Owns the folder's place. Does not own what is in it, nor which folder has texts and
compiled programs: a setting of the run names it (`--data.cache-dir`).
"""

import os
from pathlib import Path

_DEFAULT = Path("~/.cache")


def user_cache(name: str) -> Path:
    """Return the folder $XDG_CACHE_HOME/hetjax/NAME, by default in ~/.cache."""
    return expanded(_DEFAULT / "hetjax" / name)


def expanded(folder: Path) -> Path:
    """Return the folder without ~; below ~/.cache, it is below $XDG_CACHE_HOME.

    As the XDG Base Directory specification says, a relative $XDG_CACHE_HOME is ignored.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if home.is_absolute() and folder.is_relative_to(_DEFAULT):
        return home / folder.relative_to(_DEFAULT)
    return folder.expanduser()
