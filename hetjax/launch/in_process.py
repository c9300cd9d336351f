# SPDX-License-Identifier: Apache-2.0
"""The launcher of a run in one process: its worker is here, and so are its devices.

Owns which nodes of now this process has devices for, and what is said where it has
none. Does not own who is there (`elastic/membership.py`), nor what the worker makes of
its settings.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from hetjax.cluster.cluster import Cluster, Node, part_of
from hetjax.plans.worker_map import EMBEDDED
from hetjax.runtime.rpc.schema import Json
from hetjax.runtime.worker.in_process import InProcessConnections
from hetjax.runtime.worker.service import Work


class InThisProcess:
    """One worker, which `make` gives its work; `stack` ends it.

    It has the devices of the nodes of `cluster` and gets no others: JAX has them from
    its start.
    """

    def __init__(
        self, cluster: Cluster, make: Callable[[Json], Work], stack: ExitStack
    ) -> None:
        self.connections = InProcessConnections(EMBEDDED, make)
        stack.callback(self.connections.close)
        self._had = {node.name: node for node in cluster.nodes}
        self._seen = self._present = cluster
        self._refused = set[Node]()

    def start(self, workers: Sequence[str]) -> None:
        """It is there."""

    def present(self, cluster: Cluster, again: bool) -> Cluster:
        """The nodes that have devices here; if none has, they stay who they were."""
        if cluster != self._seen:
            self._seen = cluster
            usable = tuple(filter(None, map(self._here, cluster.nodes)))
            if usable:
                kept = part_of(cluster, {node.name for node in usable})
                self._present = replace(kept, nodes=usable)
            else:
                names = ", ".join(node.name for node in self._present.nodes)
                warnings.warn(
                    "no other node is there: the run keeps the plan that it has, on "
                    f"{names}",
                    stacklevel=2,
                )
        return self._present

    def _here(self, node: Node) -> Node | None:
        """What this process has devices for; warns once if that is another node."""
        had = self._had.get(node.name)
        if had and had.device == node.device and had.count >= node.count:
            return node
        if node not in self._refused:
            self._refused.add(node)
            as_ = f"used as {had.count} x {had.device}" if had else "not used"
            warnings.warn(
                f"node {node.name!r} ({node.count} x {node.device}) is {as_}: this "
                "process gets no other devices while it runs; stop the run (it saves "
                "its state) and start it again to use the node",
                stacklevel=2,
            )
        return had
