# SPDX-License-Identifier: Apache-2.0
"""Tracks which nodes a run has: those of its cluster file that are there and stay.

Owns noticing that the file has changed during the run, and which nodes are about to
leave. Does not own which machines are there (`launchers/launcher.py`), notices that a
node is about to leave (`notices.py`), nor what follows from a change (`driver.py`).
"""

import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hetjax.cluster.cluster import Cluster, Node, part_of
from hetjax.cluster.cluster_files import load_cluster
from hetjax.errors import BadInput

# Returns the part of a cluster that is there, or None if nothing is; the flag says
# whether to look again instead of using a recent result
Present = Callable[[Cluster, bool], Cluster | None]


class Membership:
    """The current cluster; `leave` may be called from any thread."""

    def __init__(
        self,
        cluster: Cluster,
        file: Path | None,
        present: Present = lambda cluster, again: cluster,
    ) -> None:
        self._file, self._cluster, self._present = file, cluster, present
        self._here: Cluster | None = cluster
        self._read_ns = _changed_ns(file)
        self._leaving: frozenset[str] = frozenset()
        self._lock = threading.Lock()

    def leave(self, node: str) -> bool:
        """Go on without this node, which may be gone already.

        Return False if there is no other node.
        """
        with self._lock:
            names = (self._here or self._cluster).names
            if not names - self._leaving - {node}:
                return False
            self._leaving |= {node} & names
            return True

    def missing(self) -> tuple[Node, ...]:
        """Return the file's nodes that are absent; may be called from any thread."""
        with self._lock:
            self._here = self._present(self._cluster, False)
            names = self._here.names if self._here else frozenset[str]()
            return tuple(n for n in self._cluster.nodes if n.name not in names)

    def now(self, *, again: bool = False) -> Cluster:
        """Return the file's nodes that are there, without those that leave.

        If none is there, return all, any of which may come back. A leaving node counts
        again once it has been absent. A file that cannot be read causes a warning and
        changes nothing. `again` looks for machines now.
        """
        with self._lock:
            changed_ns = _changed_ns(self._file)
            if self._file is not None and changed_ns != self._read_ns:
                self._read_ns = changed_ns
                self._read(self._file)
            self._here = self._present(self._cluster, again)
            here = self._here or self._cluster
            found, self._leaving = staying(here, self._leaving)
            return found

    def _read(self, file: Path) -> None:
        try:
            found = load_cluster(file)
        except BadInput as bad:
            warnings.warn(f"cluster file {file} is not used: {bad}", stacklevel=2)
            return
        self._cluster = replace(found, name=self._cluster.name)


def staying(here: Cluster, leaving: frozenset[str]) -> tuple[Cluster, frozenset[str]]:
    """Return the nodes here without those that leave, and the leaving nodes still here.

    If all leave, all stay: the run ends by other means.
    """
    names = here.names
    left = leaving & names
    if not left or left == names:
        return here, left
    return part_of(here, names - left), left


def _changed_ns(file: Path | None) -> int | None:
    try:
        return None if file is None else file.stat().st_mtime_ns
    except OSError:
        return None
