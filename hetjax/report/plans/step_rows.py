# SPDX-License-Identifier: Apache-2.0
"""Describes any simulated plan: a row per stage, a bar per device.

Owns words, figures and columns. Does not own how they are laid out, nor the description
of a search (`plan_rows.py`).
"""

import math
from dataclasses import dataclass

from hetjax.cluster.cluster import Cluster
from hetjax.plans.plan import Plan
from hetjax.report.layout_rows import alike_replicas
from hetjax.report.prediction import first_device, lane_name, memory_label
from hetjax.schedule.predicted import Predicted
from hetjax.schedule.simulation.memory import MemoryUse
from hetjax.schedule.simulation.result import Lane, lane_of

_MOST_STAGES = 64  # that are listed one by one

Row = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBar:
    """The peak memory of the devices of some lanes, all of one kind."""

    kind: str
    lanes: tuple[Lane, ...]
    use: MemoryUse
    capacity_bytes: float

    @property
    def name(self) -> str:
        more = len(self.lanes) - 1
        return lane_name(self.lanes[0]) + (f" and {more} like it" if more else "")

    @property
    def parts(self) -> dict[str, int]:
        """The bytes, in the order of the bar."""
        return {
            "static": self.use.static_bytes,
            "residuals": self.use.residual_bytes,
            "activations": self.use.activation_bytes,
            "workspace": self.use.workspace_bytes,
        }

    @property
    def scale_bytes(self) -> float:
        """The bytes that the whole bar stands for."""
        known = math.isfinite(self.capacity_bytes)
        return self.capacity_bytes if known else float(self.use.total_bytes)

    @property
    def label(self) -> str:
        return memory_label(self.use.total_bytes, self.capacity_bytes)


def stage_header(plan: Plan) -> Row:
    """Return the columns of `stage_rows`."""
    return (*plan.columns, "busy")


def stage_rows(best: Predicted, cluster: Cluster) -> list[Row]:
    """Return a row per stage; in large plans, only of the first of alike replicas."""
    plan = best.plan
    alike = {group[0]: len(group) - 1 for group in alike_replicas(plan, cluster)}
    large = len(plan.stages()) > _MOST_STAGES
    rows = []
    for (r, s, stage), row in zip(plan.stages(), plan.rows(), strict=True):
        if large and r not in alike:
            continue
        if large and alike[r]:
            row = (f"{r} and {alike[r]} like it" if s == 0 else "", *row[1:])
        busy_s = best.simulation.shares[stage.node, stage.devices].busy_s
        rows.append((*row, f"{busy_s / best.simulation.step_time_s:.1%}"))
    return rows


def memory_bars(best: Predicted, cluster: Cluster) -> list[MemoryBar]:
    """Return a bar per lane, by kind of device in the cluster's order.

    In large plans, lanes of one kind with equal bars share one.
    """
    kinds = {node.name: node.device for node in cluster.nodes}
    order = list(dict.fromkeys(kinds.values()))
    lanes = list(dict.fromkeys(lane_of(best.plan).values()))
    lanes.sort(key=lambda lane: order.index(kinds[lane[0]]))
    large = len(lanes) > _MOST_STAGES
    found: dict[object, list[Lane]] = {}
    for lane in lanes:
        device = first_device(lane)
        same = kinds[lane[0]], best.memory[device], best.capacity_bytes[device]
        found.setdefault(same if large else lane, []).append(lane)
    return [
        MemoryBar(
            kind=kinds[group[0][0]],
            lanes=tuple(group),
            use=best.memory[first_device(group[0])],
            capacity_bytes=best.capacity_bytes[first_device(group[0])],
        )
        for group in found.values()
    ]
