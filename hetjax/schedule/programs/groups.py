# SPDX-License-Identifier: Apache-2.0
"""Who takes part in which REDUCE, and in what order groups are reduced.

Owns the groups of a plan: its segments and its tied parameters, each with the stages
that hold it. Does not own when a REDUCE is issued (`lower.py`) nor how it is computed
(`mesh/`).
"""

from hetjax.plans.plan import Plan, segments
from hetjax.schedule.programs.action import Group, StageKey, Tied


def reduce_groups(plan: Plan, tied: Tied) -> dict[Group, tuple[StageKey, ...]]:
    """Return the holders of every group with more than one, in the order of REDUCE.

    Highest layers come first, because their gradients are done first; a tied
    parameter's gradients come from both ends of the pipeline, so it comes last.
    """
    stages = [(r, s, stage.layers) for r, s, stage in plan.stages()]
    keys = {(r, s) for r, s, _ in stages}
    groups: dict[Group, tuple[StageKey, ...]] = {}
    for lo, hi in reversed(segments(plan)):
        groups[lo, hi] = tuple(
            (r, s) for r, s, layers in stages if layers[0] <= lo and hi <= layers[1]
        )
    for path in sorted(tied):
        assert keys.issuperset(tied[path]), f"{path} is held outside the plan"
        groups[path] = tuple(sorted(set(tied[path])))
    return {group: holders for group, holders in groups.items() if len(holders) > 1}
