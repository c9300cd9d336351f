# SPDX-License-Identifier: Apache-2.0
"""Replicas that differ in nothing but their places, so that they can be told once.

Owns what makes two replicas alike. Does not own how they are shown (`report/`).
"""

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Cluster
from hetjax.plans.plan import Plan


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
