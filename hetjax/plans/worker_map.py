# SPDX-License-Identifier: Apache-2.0
"""Maps a plan's stages and devices to worker processes: one per host of its nodes.

A stage's members are the workers that have devices of its mesh, in host order. The
first member leads the stage. A node with one host has one worker, named like the node.
Does not own starting workers nor joining members (`hetjax/mesh/multihost.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hetjax.cluster.cluster import Node
from hetjax.names import is_worker
from hetjax.plans.plan import Plan, StageKey

EMBEDDED = "embedded"  # the worker of a run in one process; it has all nodes
Ranks = tuple[tuple[str, ...], ...]  # for each data rank, the workers with its rows
Share = tuple[tuple[str, ...], tuple[int, ...]]  # workers, and the rows they share


@dataclass(frozen=True)
class WorkerMap:
    """The workers of a plan. A node that is not in `nodes` has one host.

    If `only` is given, that worker has all stages.
    """

    plan: Plan
    nodes: tuple[Node, ...] = ()
    only: str | None = None

    @cached_property
    def workers(self) -> tuple[str, ...]:
        """All hosts of the plan's nodes, in the order of its stages."""
        if self.only is not None:
            return (self.only,)
        names = dict.fromkeys(stage.node for _, _, stage in self.plan.stages())
        return tuple(worker for name in names for worker in self.hosts(name))

    @cached_property
    def members(self) -> dict[StageKey, tuple[str, ...]]:
        """The members of each stage."""
        return {
            (r, s): tuple(
                w for w in self.hosts(stage.node) if w in self._by_device[r, s]
            )
            for r, s, stage in self.plan.stages()
        }

    @cached_property
    def ranks(self) -> dict[StageKey, Ranks]:
        """For each stage and data rank, the distinct workers that have its rows."""
        return {
            (r, s): tuple(
                tuple(dict.fromkeys(self._by_device[r, s][at : at + stage.mesh.tensor]))
                for at in range(0, len(stage.devices), stage.mesh.tensor)
            )
            for r, s, stage in self.plan.stages()
        }

    def hosts(self, node: str) -> tuple[str, ...]:
        """Return the workers of a node."""
        if self.only is not None:
            return (self.only,)
        return self._several[node].workers if node in self._several else (node,)

    def worker_of(self, node: str, device: int) -> str:
        """Return the worker that has this device of the node."""
        if self.only is not None:
            return self.only
        if node not in self._several:
            return node
        return self.hosts(node)[device // self._several[node].devices_per_host]

    def leader(self, stage: StageKey) -> str:
        return self.members[stage][0]

    def within(self, worker: str) -> set[StageKey]:
        """Return the stages of which the worker has all devices."""
        return {key for key, found in self.members.items() if found == (worker,)}

    def shares(self, holders: Sequence[StageKey], num_rows: int) -> list[Share]:
        """Group the rows of a gradient group by the workers that have them.

        The workers of a share are one per holder. All devices of a holder, counted
        tensor-major, have equally many consecutive rows (`hetjax/comm/reduction.py`).
        """
        found: dict[tuple[str, ...], list[int]] = {}
        owners = [self._row_owners(holder) for holder in holders]
        for row in range(num_rows):
            who = tuple(own[row * len(own) // num_rows] for own in owners)
            found.setdefault(who, []).append(row)
        return [(who, tuple(rows)) for who, rows in found.items()]

    def _row_owners(self, stage: StageKey) -> list[str]:
        devices = self._by_device[stage]
        num_tensor = len(devices) // len(self.ranks[stage])
        return [w for t in range(num_tensor) for w in devices[t::num_tensor]]

    @cached_property
    def _by_device(self) -> dict[StageKey, list[str]]:
        return {
            (r, s): [self.worker_of(stage.node, device) for device in stage.devices]
            for r, s, stage in self.plan.stages()
        }

    @cached_property
    def _several(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes if node.hosts > 1}


def node_of(worker: str) -> str:
    """Return the node of a worker; no node's name has a slash."""
    return worker.partition("/")[0]


def file_name(worker: str) -> str:
    """Return the worker's name as one path component."""
    assert is_worker(worker), f"{worker!r} is not a worker's name"
    return worker.replace("/", "@")
