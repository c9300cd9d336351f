# SPDX-License-Identifier: Apache-2.0
"""What HARP's dynamic program is given: clusters in order, submeshes, hops.

Owns the rules of the space (arXiv 2509.24859): a stage has a submesh inside one node,
the next stage is on the same cluster or the next one, all devices are used but for idle
ones that are allowed, launch-aheads follow HARP's thresholds. Does not own the program
(`hapt_program.py`) nor where times come from (`hapt.py`).

Letters of array names: C clusters, K launch-aheads from 0, I and J first layer and end
of a range, U groups of devices in use.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hetjax.planner.model.problem import Floats, Ints
from hetjax.schedule.launch_ahead import harp_delta

NEVER = 2**20  # a launch-ahead that no stage has


@dataclass(frozen=True, kw_only=True, eq=False)
class Submesh:
    """So many groups of devices of one node, and what a stage takes there.

    `stage_s_KIJ` does not fall with K; infinite where it does not fit.
    """

    num_groups: int
    stage_s_KIJ: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class SubCluster:
    """Equal nodes; a group of devices is what is handed out at least.

    All groups but `num_idle` at most are to be used. `straddles` if stages in sequence
    could lie over the border of two nodes, which they may not.
    """

    num_groups: int
    num_idle: int
    groups_per_node: int
    straddles: bool
    submeshes: tuple[Submesh, ...]

    @property
    def enough(self) -> slice:
        """Numbers of groups in use that are enough to go on to another cluster."""
        return slice(max(self.num_groups - self.num_idle, 1), self.num_groups + 1)

    def fits_U(self, num_groups: int) -> np.ndarray:
        """Whether a stage may be the last of U groups in use, from U = its own on."""
        used = np.arange(num_groups, self.num_groups + 1)
        if not self.straddles:
            return np.ones(len(used), dtype=bool)
        per_node = self.groups_per_node
        return (used - num_groups) // per_node == (used - 1) // per_node


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """Clusters in the order in which a pipeline goes over them.

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
        """Every time that the slowest stage or hop can have."""
        tables = [m.stage_s_KIJ for c in self.clusters for m in c.submeshes]
        inner = self.hop_s_CCJ[:, :, 1:-1]
        found = np.concatenate([np.unique(table) for table in (*tables, inner)])
        found = np.unique(found[np.isfinite(found)])
        return found[np.diff(found, prepend=-np.inf) > 1e-9 * found]

    def following(self, cluster: int) -> range:
        """The later clusters that stages may go on to: no others but idle ones."""
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
        """What is added to the launch-ahead before each hop, by (C, C, J); very much
        for hops over the limit."""
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
