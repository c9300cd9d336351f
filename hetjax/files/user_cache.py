# SPDX-License-Identifier: Apache-2.0
"""Finds the folder in which hetjax keeps files for a user between runs.

Owns the folder's place. Does not own what is in it, nor the folder of texts and
compiled programs, which a setting of the run names (`--data.cache-dir`).
"""

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """Return the folder $XDG_CACHE_HOME/hetjax/NAME, by default in ~/.cache."""
    variable = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(variable) if os.path.isabs(variable) else Path.home() / ".cache"
    return home / "hetjax" / name
