# SPDX-License-Identifier: Apache-2.0
"""Which nodes a run has now: those of its cluster file, without those that leave.

Owns noticing that the file has changed while the run goes on. Does not own notices that
a node is about to leave (`notices.py`), nor what follows from a change (`elastic.py`).
"""

import threading
import warnings
from dataclasses import replace
from pathlib import Path

from hetjax.cluster.cluster import Cluster, part_of
from hetjax.cluster.files import load_cluster
from hetjax.errors import BadInput


class Membership:
    """The cluster of now; `leave` may be called from any thread."""

    def __init__(self, cluster: Cluster, file: Path | None) -> None:
        self._file, self._cluster = file, cluster
        self._read_ns = _changed_ns(file)
        self._leaving: set[str] = set()
        self._lock = threading.Lock()

    def leave(self, node: str) -> bool:
        """Go on without this node; False if there is none of that name, or no other."""
        with self._lock:
            names = {found.name for found in self._cluster.nodes}
            if node not in names or names == self._leaving | {node}:
                return False
            self._leaving.add(node)
            return True

    def now(self) -> Cluster:
        """The nodes of the file without those that leave.

        A file that cannot be read changes nothing, with a warning.
        """
        with self._lock:
            changed_ns = _changed_ns(self._file)
            if self._file is not None and changed_ns != self._read_ns:
                self._read_ns = changed_ns
                self._read(self._file)
            staying = {n.name for n in self._cluster.nodes} - self._leaving
            if len(staying) == len(self._cluster.nodes):
                return self._cluster
            return part_of(self._cluster, staying)

    def _read(self, file: Path) -> None:
        try:
            found = load_cluster(file)
        except BadInput as bad:
            warnings.warn(f"cluster file {file} is not used: {bad}", stacklevel=2)
            return
        self._cluster = replace(found, name=self._cluster.name)
        self._leaving &= {node.name for node in found.nodes}


def _changed_ns(file: Path | None) -> int | None:
    try:
        return None if file is None else file.stat().st_mtime_ns
    except OSError:
        return None
