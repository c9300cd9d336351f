# SPDX-License-Identifier: Apache-2.0
"""The picture of a layout: which node holds which layers of which replica.

Owns the drawing, for print and screen: one row per node, one box per stage as wide as
its devices, coloured by replica (Okabe and Ito's colours, which colour-blind readers
can tell apart), idle devices hatched. Clusters too large for that are told by what
repeats: replicas that are alike share a letter, and nodes that hold the same a row.
Does not own the plan's times (`timeline.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Cluster, Node
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.report.picture import (
    EDGE,
    GREY,
    IDLE,
    STYLE,
    WIDTH_INCHES,
    Picture,
    draw_legend,
    lighter,
    matplotlib_module,
    patch,
    titled_axes,
)


def alike_replicas(plan: Plan, cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Return the replicas' indices in groups that are alike, by their first ones.

    Alike are equal microbatches, and stage for stage the same kind of device, mesh,
    layers, remat and launch-ahead.
    """
    kinds = {node.name: canonical_name(node.device) for node in cluster.nodes}
    groups: dict[object, list[int]] = {}
    for r, replica in enumerate(plan.replicas):
        stages = tuple(
            (kinds[s.node], s.mesh, s.layers, s.remat, s.launch_ahead)
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


MOST_DEVICES = 64  # of a cluster that is drawn node by node
_MOST_ROWS = 40
_MOST_REPLICAS = 8  # with a colour each

_COLOURS = (
    "#56b4e9",
    "#e69f00",
    "#009e73",
    "#f0e442",
    "#cc79a7",
    "#0072b2",
    "#d55e00",
    "#999999",
)
_LIGHTER = 0.35  # than these, so that dark letters can be read on them
_NAMES_INCHES, _ROW_INCHES, _MARGINS_INCHES = 1.9, 0.5, 1.0
_GAP = 0.14  # between rows, of a row
_NOTCH = 0.12  # between devices of a box, of a row
_POINTS, _POINT_WIDTH = 7.0, 0.56  # of text; mean width of a letter in heights


@dataclass(frozen=True, kw_only=True, slots=True)
class _Box:
    """Neighbouring devices of a node that hold the same stage, or nothing."""

    first: int
    num_devices: int
    key: tuple[int, int] | None

    @property
    def middle(self) -> float:
        return self.first + self.num_devices / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """Nodes that are drawn as one."""

    nodes: tuple[Node, ...]
    boxes: tuple[_Box, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Names:
    """What replicas are called and coloured: alone, or as one of those alike."""

    groups: tuple[tuple[int, ...], ...]
    by_group: bool  # letters for groups, in place of numbers
    shared_colours: bool

    def group(self, replica: int) -> int:
        return next(g for g, group in enumerate(self.groups) if replica in group)

    def name(self, replica: int) -> str:
        return _letter(self.group(replica)) if self.by_group else f"r{replica}"

    def colour(self, replica: int) -> tuple[float, ...]:
        number = self.group(replica) if self.shared_colours else replica
        return lighter(_COLOURS[number % len(_COLOURS)], _LIGHTER)


def layout_picture(plan: Plan, cluster: Cluster, title: str) -> Picture:
    """Draw the plan on its cluster; BadInput where matplotlib is not installed."""
    with matplotlib_module().rc_context(STYLE):
        return Picture(_figure(plan, cluster, title))


def _figure(plan: Plan, cluster: Cluster, title: str) -> Any:
    groups = alike_replicas(plan, cluster)
    large = cluster.num_devices > MOST_DEVICES
    names = _Names(
        groups=groups,
        by_group=large,
        shared_colours=large or len(plan.replicas) > _MOST_REPLICAS,
    )
    rows = _rows(plan, cluster, names) if large else _one_row_each(plan, cluster)
    left_out, rows = rows[_MOST_ROWS:], rows[:_MOST_ROWS]
    height = _ROW_INCHES * (1 + _GAP) * len(rows) + _MARGINS_INCHES
    figure, axes = titled_axes(height, title)
    _prepare(axes, rows)
    for at, row in enumerate(rows):
        _draw_row(axes, row, at * (1 + _GAP), plan, names)
    num_left_out = sum(len(row.nodes) for row in left_out)
    _draw_legend(figure, plan, names, rows, num_left_out)
    return figure


def _one_row_each(plan: Plan, cluster: Cluster) -> list[_Row]:
    return [
        _Row(nodes=(node,), boxes=tuple(_boxes(plan, node))) for node in cluster.nodes
    ]


def _rows(plan: Plan, cluster: Cluster, names: _Names) -> list[_Row]:
    """One row for all nodes of a kind that hold the same stages of alike replicas."""
    found: dict[object, list[_Row]] = {}
    for row in _one_row_each(plan, cluster):
        node = row.nodes[0]
        held = tuple(
            (box.first, box.key and (names.group(box.key[0]), box.key[1]))
            for box in row.boxes
        )
        what = node.device, node.count, node.zone, held
        found.setdefault(what, []).append(row)
    return [
        _Row(nodes=tuple(row.nodes[0] for row in rows), boxes=rows[0].boxes)
        for rows in found.values()
    ]


def _boxes(plan: Plan, node: Node) -> Iterator[_Box]:
    """The node's devices in order; of interleaved stages the first stands for all."""
    held: dict[int, tuple[int, int]] = {}
    for r, s, stage in plan.stages():
        if stage.node == node.name:
            for device in stage.devices:
                held.setdefault(device, (r, s))
    for key, devices in groupby(range(node.count), held.get):
        found = list(devices)
        yield _Box(first=found[0], num_devices=len(found), key=key)


def _prepare(axes: Any, rows: list[_Row]) -> None:
    """Set the scales: devices along, rows down; node names at the left."""
    most = max(row.nodes[0].count for row in rows)
    axes.set_xlim(0, most)
    axes.set_ylim(len(rows) * (1 + _GAP) - _GAP / 2, -_GAP / 2)
    axes.spines[:].set_visible(False)
    axes.xaxis.tick_top()
    step = -(-most // 16)
    ticks = range(0, most, step)
    names = [f"device {i}" if i == 0 and most <= 8 else str(i) for i in ticks]
    axes.set_xticks([i + 0.5 for i in ticks], names)
    axes.tick_params(length=0, labelsize=_POINTS, labelcolor=GREY)
    axes.set_yticks([])
    for at, row in enumerate(rows):
        _name_row(axes, row, at * (1 + _GAP))


def _name_row(axes: Any, row: _Row, top: float) -> None:
    node, others = row.nodes[0], len(row.nodes) - 1
    name = f"{node.name} and {others} more" if others else node.name
    kind = f"{node.device}, {node.zone}" if node.zone else node.device
    kind += ", spot" if node.spot else ""
    place: dict[str, Any] = {
        "xycoords": ("axes fraction", "data"),
        "textcoords": "offset points",
        "ha": "right",
        "annotation_clip": False,
    }
    at = (0.0, top + 0.5)
    axes.annotate(name, at, (-6, 1), va="bottom", fontsize=8, **place)
    axes.annotate(kind, at, (-6, -1), va="top", fontsize=_POINTS, color=GREY, **place)


def _draw_row(axes: Any, row: _Row, top: float, plan: Plan, names: _Names) -> None:
    rectangle = matplotlib_module().patches.Rectangle
    most = axes.get_xlim()[1]
    points = (WIDTH_INCHES - _NAMES_INCHES) * 72 / most  # of a device's width, about
    for box in row.boxes:
        look = IDLE
        if box.key is not None:
            look = {"facecolor": names.colour(box.key[0]), "edgecolor": EDGE}
        at = (box.first, top)
        axes.add_patch(rectangle(at, box.num_devices, 1, linewidth=0.8, **look))
        inner = [box.first + i for i in range(1, box.num_devices)]
        line = {"color": look["edgecolor"], "linewidth": 0.6}
        axes.vlines(inner, top, top + _NOTCH, **line)
        axes.vlines(inner, top + 1 - _NOTCH, top + 1, **line)
        _write(axes, box, top, points * box.num_devices, plan, names)


def _write(
    axes: Any, box: _Box, top: float, width_points: float, plan: Plan, names: _Names
) -> None:
    """Write the longest of the box's texts that it has room for, if any."""
    look: dict[str, Any] = {"ha": "center", "va": "center", "linespacing": 1.15}
    if box.key is None:
        texts = ["idle"]
        look |= {"color": GREY, "bbox": {"color": "white", "pad": 1}}
    else:
        r, s = box.key
        texts = _texts(names.name(r), s, plan.replicas[r], plan.replicas[r].stages[s])
    for text in texts:
        longest = max(map(len, text.split("\n")))
        if longest * _POINTS * _POINT_WIDTH + 3 < width_points:
            axes.text(box.middle, top + 0.5, text, fontsize=_POINTS, **look)
            return


def _texts(name: str, s: int, replica: Replica, stage: Stage) -> list[str]:
    """What a box says, from much to little."""
    first, last = stage.layers[0], stage.layers[1] - 1
    layers = f"{first}..{last}" if last > first else str(first)
    sizes = {"tensor": stage.mesh.tensor, "data": stage.mesh.data}
    split = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    remat = [] if stage.remat == "none" else [f"remat {stage.remat}"]
    batches = f"{replica.num_microbatches} x {replica.microbatch_size}"
    split_line = [", ".join(split)] if split else []
    how = [", ".join([*split, *remat])] if split or remat else []
    lines = [
        [f"{name}.s{s}: {batches} sequences", f"layers {layers}", *how],
        [f"{name}.s{s}: {batches}", f"layers {layers}", *split_line],
        [f"{name}.s{s}", f"layers {layers}", *split_line],
        [f"{name}.s{s}", layers],
        [f"{name}.s{s}"],
    ]
    return ["\n".join(found) for found in lines]


def _draw_legend(
    figure: Any, plan: Plan, names: _Names, rows: list[_Row], num_left_out: int
) -> None:
    groups: list[tuple[int, ...]] = list(names.groups)
    if not names.shared_colours:
        groups = [(r,) for r in range(len(plan.replicas))]
    handles = [
        patch(
            _told(plan, names, group),
            facecolor=names.colour(group[0]),
            edgecolor=EDGE,
        )
        for group in groups[: 2 * len(_COLOURS)]
    ]
    if any(box.key is None for row in rows for box in row.boxes):
        handles.append(patch("idle", **IDLE))
    if num_left_out:
        handles.append(patch(f"and {num_left_out} more nodes", alpha=0))
    draw_legend(figure, handles, min(len(handles), 4), _POINTS)


def _told(plan: Plan, names: _Names, group: tuple[int, ...]) -> str:
    first, *others = group
    replica = plan.replicas[first]
    batches = f"{replica.num_microbatches} x {replica.microbatch_size} sequences"
    if names.by_group:
        many = f"{len(group)} replicas of " if others else ""
        return f"{names.name(first)}: {many}{batches}"
    if not others:
        return f"replica r{first}: {batches}"
    return f"replicas {spelled(group)}: {batches} each"


def _letter(number: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    more, last = divmod(number, 26)
    return (_letter(more - 1) if more else "") + chr(ord("A") + last)
