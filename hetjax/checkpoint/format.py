# SPDX-License-Identifier: Apache-2.0
"""Where checkpoints lie and what the leaves of an entry are called.

    <directory>/step_00000010/<worker>/manifest.json
    <directory>/step_00000010/<worker>/state/<entry name>.<i>of<n>/{zarr.json, c.0.0}

Owns these names, those of attempts, and the fixed slices behind the leaves. No plan
appears in them, so directories of several workers merge into one. Does not own writing
(`save.py`), reading (`restore.py`) nor what makes a step valid (`manifest.py`).
"""

import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hetjax.checkpoint.entry import Entry
from hetjax.names import inside

MANIFEST = "manifest.json"
STATES = ("state", "state_2")  # the second while a step is saved over itself
_ATTEMPT = re.compile("[0-9a-f]{16}")
_STEP = re.compile(r"step_(\d{8,})")


def step_directory(directory: Path, step: int) -> Path:
    """The directory of a step, all workers together."""
    return directory / f"step_{step:08d}"


def part_directory(directory: Path, step: int, worker: str) -> Path:
    """The directory of one worker's part of a step; raises UnsafeName."""
    return inside(step_directory(directory, step), worker)


def step_numbers(directory: Path) -> list[int]:
    """Steps that have a directory, finished or not, ascending."""
    if not directory.is_dir():
        return []
    folders = (path for path in directory.iterdir() if path.is_dir())
    matches = (_STEP.fullmatch(path.name) for path in folders)
    return sorted(int(match[1]) for match in matches if match)


class Attempts:
    """Names for saves of steps: each comes after all that were given or heard of.

    The clock only keeps them apart from those that nobody here has heard of: it may
    have been set back.
    """

    def __init__(self, heard: Iterable[str] = ()) -> None:
        self._last = 0
        self.hear(heard)

    def hear(self, names: Iterable[str]) -> None:
        """Names that are there already; what is none of ours is passed over."""
        ours = (int(name, 16) for name in names if _ATTEMPT.fullmatch(name))
        self._last = max([self._last, *ours])

    def new(self) -> str:
        """A name for a save."""
        self._last = max(self._last + 1, time.time_ns())
        return f"{self._last:016x}"


def leaf_names(entry: Entry) -> list[str]:
    """Names of the entry's leaves in slice order; an array without elements has none.

    >>> leaf_names(Entry("params.head.w", (4, 6), np.dtype("float32"), (1, 2)))
    ['params.head.w.0of2', 'params.head.w.1of2']
    """
    number = entry.slices[1] if 0 not in entry.shape else 0
    return [f"{entry.name}.{i}of{number}" for i in range(number)]


def split_leaves(entry: Entry, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The entry's leaves with their values: views, nothing is copied."""
    assert value.shape == entry.shape and value.dtype == entry.dtype, entry
    value = np.asarray(value)  # NumPy makes a scalar of an array's last dim
    names, dim = leaf_names(entry), entry.slices[0]
    parts = np.split(value, len(names), axis=dim) if len(names) > 1 else [value]
    return zip(names, parts[: len(names)], strict=True)


def join_leaves(entry: Entry, parts: list[np.ndarray]) -> np.ndarray:
    """The whole value of the entry from its leaves in slice order."""
    if not parts:
        return np.empty(entry.shape, entry.dtype)
    return parts[0] if len(parts) == 1 else np.concatenate(parts, entry.slices[0])


def leaf_tree(named: Iterable[tuple[str, np.ndarray]]) -> dict[str, Any]:
    """Nested dicts, of which Orbax joins the keys with dots: again the leaf names."""
    root: dict[str, Any] = {}
    for name, value in named:
        *path, last = name.split(".")
        node = root
        for key in path:
            node = node.setdefault(key, {})
        assert last not in node, f"two leaves are called {name}"
        node[last] = value
    return root
