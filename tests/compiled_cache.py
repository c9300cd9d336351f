# SPDX-License-Identifier: Apache-2.0
"""Where tests keep compiled programs: a folder per release of JAX, for all clones.

It is never needed. If it cannot be written, a temporary folder replaces it. Damaged
entries, and entries that no test has read for two weeks, are removed before the tests.
"""

import atexit
import os
import shutil
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path

import jax
from jax._src import compilation_cache

UNUSED_DAYS = 14
_CHECKED = "checked"  # as old as the last check of the entries beside it


def compiled_folder() -> Path:
    """Return the shared folder, or a temporary one if that cannot be written."""
    folder = cache_root() / jax.__version__
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        substitute = Path(tempfile.mkdtemp(prefix="hetjax-tests-"))
        warnings.warn(
            f"cannot write to {folder} ({error}): compiled programs are in "
            f"{substitute}, and are compiled again next time",
            stacklevel=2,
        )
        atexit.register(shutil.rmtree, substitute, ignore_errors=True)
        return substitute


def cache_root() -> Path:
    """Return the folder of all that tests keep for later runs, in any clone."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hetjax-tests"


def remove_unusable(folder: Path) -> None:
    """Remove this folder's damaged entries, and any release's long unused ones.

    JAX would warn of a damaged entry each time, and never replace it.
    """
    _remove_unused(folder.parent)
    checked = folder / _CHECKED
    last_check = checked.stat().st_mtime if checked.exists() else 0.0
    checked.touch()
    for entry in folder.glob("*-cache"):
        with suppress(OSError):  # another run has removed it
            if entry.stat().st_mtime >= last_check and not _is_whole(entry):
                entry.unlink()


def _remove_unused(root: Path) -> None:
    """Remove entries of all releases that were not read or written for long."""
    unused_since = time.time() - UNUSED_DAYS * 24 * 3600
    for entry in root.glob("*/*-cache"):
        with suppress(OSError):
            if max(entry.stat().st_atime, entry.stat().st_mtime) < unused_since:
                entry.unlink()


def _is_whole(entry: Path) -> bool:
    """Return whether it unpacks, which verifies a checksum of its bytes."""
    try:
        compilation_cache.decompress_executable(entry.read_bytes())
    except OSError:
        raise
    except Exception:  # each compression has its own
        return False
    return True
