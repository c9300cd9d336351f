# SPDX-License-Identifier: Apache-2.0
"""Finds the lanes that take longer than others with equal work.

Owns the comparison, over the steps of a reference. Does not own the definition of equal
work (`step_times.py`) nor the reports (`detector.py`).
"""

import math
from collections.abc import Sequence

from hetjax.costs.slowness.sequential import reference
from hetjax.costs.slowness.series import WatchedParts, logs, lower_middle
from hetjax.costs.slowness.step_times import Lane, StepTimes
from hetjax.plans.plan import StageKey

_APART, _STANDARD_ERRORS = math.log(1.18), 5.0  # at least


def behind_peers(
    steps: Sequence[StepTimes], what: WatchedParts
) -> dict[StageKey, float]:
    """Return the logarithms of the slowdown factors of slow lanes.

    A lane is compared with the lower median of lanes with equal work: those on other
    nodes or, if there are none, those on other devices of its own node.
    """
    lanes_NU = logs(steps, what).lanes_NU
    lanes = [what.lanes.by_key[key] for key in what.keys]
    found = {}
    for u, lane in enumerate(lanes):
        peers = _peers(u, lane, lanes)
        if not peers:
            continue
        usual_N = lower_middle([lower_middle(lanes_NU[:, of].T) for of in peers])
        behind = reference((lanes_NU[:, u] - usual_N)[:, None])
        by = float(behind.center_K[0])
        if by >= max(_APART, _STANDARD_ERRORS * float(behind.margin_K[0])):
            found[lane.key] = by
    return found


def _peers(u: int, lane: Lane, lanes: Sequence[Lane]) -> list[list[int]]:
    """Return the lanes with equal work, by node, else by device."""
    equal = [
        v
        for v, other in enumerate(lanes)
        if v != u and lane.work is not None and other.work == lane.work
    ]
    by_node: dict[str, list[int]] = {}
    for v in equal:
        by_node.setdefault(lanes[v].node, []).append(v)
    here = by_node.pop(lane.node, [])
    if by_node:
        return [*by_node.values()]
    return [[v] for v in here if not {*lanes[v].devices} & {*lane.devices}]
