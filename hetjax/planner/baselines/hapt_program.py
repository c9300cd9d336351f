# SPDX-License-Identifier: Apache-2.0
"""HARP's dynamic program (arXiv 2509.24859): finds the cheapest pipeline over clusters.

Owns the rules of the space. A stage has a submesh inside one node. The next stage is on
the same cluster or the next one. All devices are used, except for the allowed idle
ones. Launch-aheads follow HARP's thresholds. Owns the program, which goes from the last
stage to the first. A pipeline uses up a cluster and never returns to it, so devices in
use are counted on one cluster at a time. The launch-ahead is part of the state (the
released code keeps only the cheapest one's, and may miss pipelines that fit). The cost
is the released code's: sum of all stages and hops, each hop once, plus m - 1 times the
slowest of both. The program is solved repeatedly, within a limit on this slowest. Does
not own the search over limits (`model/cuts.py`) nor the times (`hapt.py`).

Letters of array names: C clusters, K launch-aheads from 0, I and J first layer and end
of a range, U groups of devices in use.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hetjax.planner.model.cuts import best_limit
from hetjax.planner.model.deadline import check_deadline
from hetjax.planner.model.problem import Floats, Ints
from hetjax.plans.plan import LayerRange
from hetjax.schedule.launch_ahead import harp_delta

NEVER = 2**20  # a launch-ahead that no stage has


@dataclass(frozen=True, kw_only=True, eq=False)
class Submesh:
    """Some groups of devices of one node, and the seconds of a stage there.

    `stage_s_KIJ` does not fall with K; it is infinite where the stage does not fit.
    """

    num_groups: int
    stage_s_KIJ: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class SubCluster:
    """Equal nodes; a group of devices is the smallest unit of allocation.

    At most `num_idle` groups may stay unused. `straddles` is set if consecutive stages
    could put a stage across two nodes, which is not allowed.
    """

    num_groups: int
    num_idle: int
    groups_per_node: int
    straddles: bool
    submeshes: tuple[Submesh, ...]

    @property
    def enough(self) -> slice:
        """The numbers of groups in use that allow moving on to another cluster."""
        return slice(max(self.num_groups - self.num_idle, 1), self.num_groups + 1)

    def fits_U(self, num_groups: int) -> np.ndarray:
        """Return whether a stage may take the last of U groups in use, U >= its own."""
        used = np.arange(num_groups, self.num_groups + 1)
        if not self.straddles:
            return np.ones(len(used), dtype=bool)
        per_node = self.groups_per_node
        return (used - num_groups) // per_node == (used - 1) // per_node


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """Clusters in the order in which a pipeline visits them.

    `hop_s_CCJ` is one message after layer J - 1, from a cluster to another or itself.
    """

    clusters: tuple[SubCluster, ...]
    hop_s_CCJ: Floats
    num_microbatches: int

    @property
    def num_layers(self) -> int:
        return self.hop_s_CCJ.shape[2] - 1

    @cached_property
    def num_ahead(self) -> int:
        return self.clusters[0].submeshes[0].stage_s_KIJ.shape[0]

    @cached_property
    def limits(self) -> Floats:
        """All possible times of the slowest stage or hop."""
        tables = [m.stage_s_KIJ for c in self.clusters for m in c.submeshes]
        inner = self.hop_s_CCJ[:, :, 1:-1]
        found = np.concatenate([_distinct(table) for table in (*tables, inner)])
        found = np.unique(found[np.isfinite(found)])
        return found[np.diff(found, prepend=-np.inf) > 1e-9 * found]

    def following(self, cluster: int) -> range:
        """Return the later clusters to which stages may move on, skipping only idle
        ones."""
        last = cluster + 1
        while last < len(self.clusters) and self._spared(last):
            last += 1
        return range(cluster + 1, min(last + 1, len(self.clusters)))

    def may_start(self, cluster: int) -> bool:
        return all(map(self._spared, range(cluster)))

    def may_end(self, cluster: int) -> bool:
        return all(map(self._spared, range(cluster + 1, len(self.clusters))))

    def _spared(self, cluster: int) -> bool:
        return self.clusters[cluster].num_idle >= self.clusters[cluster].num_groups

    def deltas(self, limit_s: float) -> Ints:
        """Return what each hop adds to the launch-ahead, by (C, C, J); NEVER for hops
        over the limit."""
        seconds, which = np.unique(self.hop_s_CCJ, return_inverse=True)
        inside, crossing = (
            np.array([_delta(float(hop_s), limit_s, leaves) for hop_s in seconds])[
                which.reshape(self.hop_s_CCJ.shape)
            ]
            for leaves in (False, True)
        )
        same_CC1 = np.eye(len(self.clusters), dtype=bool)[:, :, None]
        return np.where(same_CC1, inside, crossing)


def _delta(hop_s: float, limit_s: float, crossing: bool) -> int:
    return harp_delta(hop_s, limit_s, crossing) if hop_s <= limit_s else NEVER


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenStage:
    """A stage of the pipeline: cluster and submesh by index."""

    cluster: int
    submesh: int
    launch_ahead: int
    layers: LayerRange


@dataclass(frozen=True, kw_only=True, slots=True)
class Cheapest:
    """The cheapest pipeline, and its step by HARP's cost."""

    step_s: float
    stages: tuple[ChosenStage, ...]


def _distinct(table: Floats) -> Floats:
    check_deadline()
    return np.unique(table)


def least_slowest_s(task: Task) -> float:
    """Return the least limit within which a pipeline exists; infinity if none fits."""
    limits = task.limits
    low, high = 0, len(limits) - 1
    if not len(limits) or not _possible(task, limits[high]):
        return math.inf
    while low < high:
        middle = (low + high) // 2
        if _possible(task, limits[middle]):
            high = middle
        else:
            low = middle + 1
    return float(limits[low])


def cheapest_pipeline(task: Task, least_s: float) -> Cheapest:
    """Return the cheapest pipeline, given the least feasible limit."""
    found = best_limit(
        task.limits[task.limits >= least_s].tolist(),
        lambda limit_s: _followed(_filled(task, limit_s)),
        task.num_microbatches - 1,
    )
    return Cheapest(step_s=found.total_s, stages=found.solution)


def _possible(task: Task, limit_s: float) -> bool:
    """Return whether a pipeline exists within the limit, by the least launch-aheads.

    `ahead_IU` is the launch-ahead of the first of the stages that hold layers I to the
    end.
    """
    num_layers, num_clusters = task.num_layers, len(task.clusters)
    delta_CCJ = task.deltas(limit_s)
    done_CI = np.full((num_clusters, num_layers + 1), NEVER)
    for c in reversed(range(num_clusters)):
        cluster = task.clusters[c]
        over_J = np.full(num_layers + 1, NEVER)
        for k in task.following(c):
            over_J = np.minimum(over_J, done_CI[k] + delta_CCJ[c, k])
        over_J[num_layers] = 1 if task.may_end(c) else NEVER
        ahead_IU = np.full((num_layers + 1, cluster.num_groups + 1), NEVER)
        for first in reversed(range(num_layers)):
            check_deadline()
            for mesh in cluster.submeshes:
                least_U = _least_ahead(
                    ahead_IU, over_J, delta_CCJ[c, c], mesh, first, limit_s
                )
                least_U[~cluster.fits_U(mesh.num_groups)] = NEVER
                to_U = ahead_IU[first, mesh.num_groups :]
                np.minimum(to_U, least_U, out=to_U)
        done_CI[c] = ahead_IU[:, cluster.enough].min(axis=1)
    return any(done_CI[c, 0] < NEVER for c in range(num_clusters) if task.may_start(c))


def _least_ahead(
    ahead_IU: Ints,
    over_J: Ints,
    delta_J: Ints,
    mesh: Submesh,
    first: int,
    limit_s: float,
) -> Ints:
    """Return the least launch-aheads of a stage on a submesh that begins at layer
    `first`, by groups then in use."""
    # the tables include launch-ahead 0
    most_J = (mesh.stage_s_KIJ[:, first] <= limit_s).sum(axis=0) - 1
    same_JU = ahead_IU[:, : ahead_IU.shape[1] - mesh.num_groups] + delta_J[:, None]
    same_JU = np.concatenate([over_J[:, None], same_JU[:, 1:]], axis=1)
    return np.where(same_JU <= most_J[:, None], same_JU, NEVER).min(axis=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Fill:
    """Least seconds of stages and hops from layer I on, within a limit.

    `fill_KIU` has, by cluster of the first of these stages, their seconds. `over_KJ`
    has, by cluster, the seconds after its last stage: other clusters, or nothing.
    """

    task: Task
    limit_s: float
    fill_KIU: list[Floats]
    over_KJ: list[Floats]
    hop_s_CJ: list[Floats]
    delta_CCJ: Ints


def _filled(task: Task, limit_s: float) -> _Fill:
    num_layers, num_clusters = task.num_layers, len(task.clusters)
    found = _Fill(
        task=task,
        limit_s=limit_s,
        fill_KIU=[np.empty(0)] * num_clusters,
        over_KJ=[np.empty(0)] * num_clusters,
        hop_s_CJ=[_within(task.hop_s_CCJ[c, c], limit_s) for c in range(num_clusters)],
        delta_CCJ=task.deltas(limit_s),
    )
    for c in reversed(range(num_clusters)):
        cluster = task.clusters[c]
        found.over_KJ[c] = _after_last(found, c)
        dims = task.num_ahead, num_layers + 1, cluster.num_groups + 1
        found.fill_KIU[c] = np.full(dims, np.inf)
        for first in reversed(range(num_layers)):
            check_deadline()
            for mesh in cluster.submeshes:
                least_KU = _least_fill(found, c, mesh, first)
                least_KU[:, ~cluster.fits_U(mesh.num_groups)] = np.inf
                to_KU = found.fill_KIU[c][:, first, mesh.num_groups :]
                np.minimum(to_KU, least_KU, out=to_KU)
    return found


def _least_fill(found: _Fill, c: int, mesh: Submesh, first: int) -> Floats:
    """Return the least seconds with a first stage on `mesh`, by groups then in use."""
    ends = slice(first + 1, None)
    stage_s_KJ = _within(mesh.stage_s_KIJ[:, first, ends], found.limit_s)
    fill_KJU = found.fill_KIU[c][:-1, ends, 1 : -mesh.num_groups or None]
    same_s_KJ = stage_s_KJ[1:] + found.hop_s_CJ[c][ends]
    num_ahead, _, width = found.fill_KIU[c].shape
    least_KU = np.full((num_ahead, width - mesh.num_groups), np.inf)
    least_KU[:, 0] = (found.over_KJ[c][:, ends] + stage_s_KJ).min(axis=1)
    if fill_KJU.size:
        least_KU[1:, 1:] = (fill_KJU + same_s_KJ[:, :, None]).min(axis=1)
    return least_KU


def _after_last(found: _Fill, c: int) -> Floats:
    """Return the least seconds of a hop to later clusters and all stages there, by the
    launch-ahead before the hop; 0 after the last layer."""
    task, num_layers = found.task, found.task.num_layers
    over_KJ = np.full((task.num_ahead, num_layers + 1), np.inf)
    for k in task.following(c):
        rest_KJ = found.fill_KIU[k][:, :, task.clusters[k].enough].min(axis=2)
        rest_KJ = rest_KJ + _within(task.hop_s_CCJ[c, k], found.limit_s)
        for j, delta in enumerate(found.delta_CCJ[c, k]):
            if delta < NEVER:
                later_K = over_KJ[delta:, j]
                np.minimum(later_K, rest_KJ[: len(later_K), j], out=later_K)
    over_KJ[:, num_layers] = np.inf
    if task.may_end(c):
        over_KJ[1, num_layers] = 0.0
    return over_KJ


class _State(NamedTuple):
    """The state before a stage: its cluster, launch-ahead, first layer, the groups in
    use there from this stage on, and the least seconds from there."""

    seconds: float
    cluster: int
    ahead: int
    first: int
    used: int


def _followed(found: _Fill) -> tuple[float, tuple[ChosenStage, ...]]:
    """Return the least seconds of all layers, and the stages that achieve them."""
    clusters = [c for c in range(len(found.fill_KIU)) if found.task.may_start(c)]
    state = start = min(_best_at(found, c, slice(None), 0) for c in clusters)
    stages = []
    while state is not None:
        stage, state = _step(found, state)
        stages.append(stage)
    return start.seconds, tuple(stages)


def _best_at(found: _Fill, c: int, aheads: slice, first: int) -> _State:
    """Return the best state on a cluster with enough groups in use."""
    enough = found.task.clusters[c].enough
    fill_KU = found.fill_KIU[c][aheads, first, enough]
    k, u = np.unravel_index(fill_KU.argmin(), fill_KU.shape)
    ahead, used = int(k) + (aheads.start or 0), int(u) + enough.start
    return _State(float(fill_KU[k, u]), c, ahead, first, used)


def _step(found: _Fill, at: _State) -> tuple[ChosenStage, _State | None]:
    """Return the next stage, and the state after it."""
    c, cluster = at.cluster, found.task.clusters[at.cluster]
    options = []
    for m, mesh in enumerate(cluster.submeshes):
        left = at.used - mesh.num_groups
        if left < 0 or not cluster.fits_U(mesh.num_groups)[left]:
            continue
        stage_s_J = _within(mesh.stage_s_KIJ[at.ahead, at.first], found.limit_s)
        rest_s_J = found.over_KJ[c][at.ahead]
        if left:
            rest_s_J = found.fill_KIU[c][at.ahead - 1, :, left] + found.hop_s_CJ[c]
        end = int((stage_s_J + rest_s_J).argmin())
        options.append((float(stage_s_J[end] + rest_s_J[end]), m, end, left))
    _, m, end, left = min(options)
    stage = ChosenStage(
        cluster=c, submesh=m, launch_ahead=at.ahead, layers=(at.first, end)
    )
    if end == found.task.num_layers:
        return stage, None
    if left:
        return stage, _State(0.0, c, at.ahead - 1, end, left)
    return stage, _next_cluster(found, c, at.ahead, end)


def _next_cluster(found: _Fill, c: int, ahead: int, end: int) -> _State:
    options = []
    for k in found.task.following(c):
        after = ahead - found.delta_CCJ[c, k, end]
        if after > 0:
            state = _best_at(found, k, slice(after, after + 1), end)
            hop_s = float(found.task.hop_s_CCJ[c, k, end])
            options.append(state._replace(seconds=state.seconds + hop_s))
    return min(options)


def _within(seconds: Floats, limit_s: float) -> Floats:
    return np.where(seconds > limit_s, np.inf, seconds)
