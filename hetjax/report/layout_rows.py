# SPDX-License-Identifier: Apache-2.0
"""Turns a layout into rows and boxes: which node holds which layers of which replica.

Owns what is drawn: a row per node, a box per stage as wide as its devices, a colour per
replica. Large clusters are drawn in groups: replicas that are alike have the name of
the first of them, and nodes with the same stages have one row. Does not own the colours
(`colours.py`) nor the drawing (`pictures/`, `html/`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Cluster, Node
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.report.colours import REPLICAS

MOST_DEVICES = 64  # of the largest cluster that is drawn node by node
_MOST_ROWS = 40
_MOST_REPLICAS = len(REPLICAS)  # that have a colour each


def alike_replicas(plan: Plan, cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Return the replicas' indices in groups of alike ones, ordered by their first.

    Replicas are alike if they have equal microbatches, and stage for stage the same
    kind of device, mesh, layers, remat, offload and launch-ahead.
    """
    kinds = {node.name: canonical_name(node.device) for node in cluster.nodes}
    groups: dict[object, list[int]] = {}
    for r, replica in enumerate(plan.replicas):
        stages = tuple(
            (kinds[s.node], s.mesh, s.layers, s.remat, s.offload, s.launch_ahead)
            for s in replica.stages
        )
        shape = replica.num_microbatches, replica.microbatch_size, stages
        groups.setdefault(shape, []).append(r)
    return tuple(map(tuple, groups.values()))


def spelled(numbers: tuple[int, ...]) -> str:
    """Return ascending integers as text, runs of three and more as a range.

    >>> spelled((0, 1, 2, 3, 6, 8, 9))
    '0..3,6,8,9'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [
        f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run))
        for run in runs
    ]
    return ",".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """Neighbouring devices of a node that hold the same stage, or nothing.

    `texts` are its possible labels, from long to short.
    """

    first: int
    num_devices: int
    key: tuple[int, int] | None
    texts: tuple[str, ...] = ("idle",)

    @property
    def middle(self) -> float:
        return self.first + self.num_devices / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRow:
    """Nodes that are drawn as one row."""

    nodes: tuple[Node, ...]
    boxes: tuple[Box, ...]

    @property
    def name(self) -> str:
        node, others = self.nodes[0], len(self.nodes) - 1
        return f"{node.name} and {others} more" if others else node.name

    @property
    def kind(self) -> str:
        node = self.nodes[0]
        kind = f"{node.device}, {node.zone}" if node.zone else node.device
        return kind + (", spot" if node.spot else "")

    @property
    def num_devices(self) -> int:
        return self.nodes[0].count


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Rows of nodes, and the names and colours of replicas, by replica or by group.

    `num_left_out` nodes are in rows beyond the most that are drawn.
    """

    plan: Plan
    rows: tuple[NodeRow, ...]
    groups: tuple[tuple[int, ...], ...]
    by_group: bool  # a replica has the name of the first that is like it
    shared_colours: bool
    num_left_out: int

    @property
    def legend(self) -> dict[str, str]:
        """The colour of each entry of the legend."""
        groups = self.groups
        if not self.shared_colours:
            groups = tuple((r,) for r in range(len(self.plan.replicas)))
        shown = groups[: 2 * len(REPLICAS)]
        return {self._legend_entry(group): self.colour(group[0]) for group in shown}

    @property
    def has_idle(self) -> bool:
        return any(box.key is None for row in self.rows for box in row.boxes)

    @property
    def most_devices(self) -> int:
        """The number of devices of the widest row."""
        return max(row.num_devices for row in self.rows)

    def colour(self, replica: int) -> str:
        number = replica
        if self.shared_colours:
            number = next(g for g, group in enumerate(self.groups) if replica in group)
        return REPLICAS[number % len(REPLICAS)]

    def _legend_entry(self, group: tuple[int, ...]) -> str:
        first, *others = group
        replica = self.plan.replicas[first]
        batches = f"{replica.num_microbatches} x {replica.microbatch_size} sequences"
        if self.by_group and others:
            return f"r{first} and {len(others)} like it: {batches} each"
        if not others:
            return f"r{first}: {batches}"
        return f"r{spelled(group)}: {batches} each"


def layout_of(plan: Plan, cluster: Cluster) -> Layout:
    """Return the layout of the plan on its cluster."""
    groups = alike_replicas(plan, cluster)
    large = cluster.num_devices > MOST_DEVICES
    group_of = {r: g for g, group in enumerate(groups) for r in group}
    names = {r: f"r{groups[g][0] if large else r}" for r, g in group_of.items()}
    rows = [
        NodeRow(nodes=(node,), boxes=tuple(_boxes(plan, node, names)))
        for node in cluster.nodes
    ]
    if large:
        rows = _shared(rows, group_of)
    return Layout(
        plan=plan,
        rows=tuple(rows[:_MOST_ROWS]),
        groups=groups,
        by_group=large,
        shared_colours=large or len(plan.replicas) > _MOST_REPLICAS,
        num_left_out=sum(len(row.nodes) for row in rows[_MOST_ROWS:]),
    )


def _shared(rows: list[NodeRow], group_of: dict[int, int]) -> list[NodeRow]:
    """Share a row among nodes of a kind that hold the same stages of alike replicas."""
    found: dict[object, list[NodeRow]] = {}
    for row in rows:
        node = row.nodes[0]
        held = tuple(
            (box.first, box.key and (group_of[box.key[0]], box.key[1]))
            for box in row.boxes
        )
        what = node.device, node.count, node.zone, held
        found.setdefault(what, []).append(row)
    return [
        NodeRow(nodes=tuple(row.nodes[0] for row in rows), boxes=rows[0].boxes)
        for rows in found.values()
    ]


def _boxes(plan: Plan, node: Node, names: dict[int, str]) -> Iterator[Box]:
    """Yield the node's devices in order, with all stages that they hold."""
    held: dict[int, list[tuple[int, int]]] = {}
    for r, s, stage in plan.stages():
        if stage.node == node.name:
            for device in stage.devices:
                held.setdefault(device, []).append((r, s))
    for keys, devices in groupby(range(node.count), held.get):
        found = list(devices)
        box = Box(first=found[0], num_devices=len(found), key=None)
        if keys is not None:
            texts = _texts(plan.replicas[keys[0][0]], names[keys[0][0]], keys)
            box = replace(box, key=keys[0], texts=tuple(texts))
        yield box


def _texts(replica: Replica, name: str, keys: Sequence[tuple[int, int]]) -> list[str]:
    """Return the possible labels of a box, from long to short."""
    stages = [replica.stages[s] for _, s in keys]
    stage, name = stages[0], f"{name}.{', '.join(f's{s}' for _, s in keys)}"
    layers = ", ".join(map(_range, stages))
    sizes = {"tensor": stage.mesh.tensor, "data": stage.mesh.data}
    split = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    remats = dict.fromkeys(stage.remat for stage in stages)
    remat = [] if [*remats] == ["none"] else [f"remat {' and '.join(remats)}"]
    remat += ["updated on the host"] * any(s.offload != "none" for s in stages)
    batches = f"{replica.num_microbatches} x {replica.microbatch_size}"
    split_line = [", ".join(split)] if split else []
    how = [", ".join([*split, *remat])] if split or remat else []
    lines = [
        [f"{name}: {batches} sequences", f"layers {layers}", *how],
        [f"{name}: {batches}", f"layers {layers}", *split_line],
        [name, f"layers {layers}", *split_line],
        [name, layers],
        [name],
    ]
    return ["\n".join(found) for found in lines]


def _range(stage: Stage) -> str:
    first, last = stage.layers[0], stage.layers[1] - 1
    return f"{first}..{last}" if last > first else str(first)
