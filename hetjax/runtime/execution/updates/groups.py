# SPDX-License-Identifier: Apache-2.0
"""Determines a stage's gradient groups: their holders, and which updates are bit-equal.

Does not own their sums (`gradient_sync.py`) nor their updates (`update.py`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import optax

from hetjax.optimizers.optimizer import NonElementwise
from hetjax.plans.plan import Group, Stage
from hetjax.schedule.programs.action import StageKey
from hetjax.stage.partition import LeafId, PlanPartition

CPU = "cpu"  # the kind of device whose updates round alike on any mesh


@dataclass(frozen=True, slots=True)
class GradientGroup:
    """A gradient group of the stage.

    The stage packs it as `rows` rows, or leaves it as accumulator leaves (`rows` is 0)
    if it has one data rank and one holder. It is `owned` if this stage is its first
    holder in the replica; one of the owners counts it at NORM. It is `shared` if other
    stages hold it, too, `is_exact` if an update rounds the same way on all of them.
    """

    name: Group
    leaf_ids: tuple[LeafId, ...]
    rows: int
    owned: bool
    shared: bool
    is_exact: bool = True

    def touches(self, index: int) -> bool:
        """Return whether the stack has a leaf of this group."""
        return any(at == index for at, _ in self.leaf_ids)


def rounds_alike(
    optimizer: optax.GradientTransformation,
    kinds: Mapping[str, str],
    group: Group,
    holders: Sequence[Stage],
) -> bool:
    """Return whether an update gives a group's weights the same bits on these stages.

    On CPUs, including the hosts that update for other devices, all updates are compiled
    to round alike (`UpdatePrograms`). Other devices round alike only if they run the
    same program on the same kind and mesh. Holders of a tied parameter do not: their
    stacks differ. A rule that sums over a leaf may add in another order on any device.
    """
    if isinstance(optimizer, NonElementwise):
        return False
    found = {
        kinds.get(stage.node, CPU) if stage.offload == "none" else CPU
        for stage in holders
    }
    meshes = {stage.mesh for stage in holders}
    is_same = len(found) == len(meshes) == 1 and not isinstance(group, str)
    return found == {CPU} or is_same


def groups_of(
    partition: PlanPartition,
    key: StageKey,
    is_exact: Callable[[Group, list[Stage]], bool],
) -> tuple[GradientGroup, ...]:
    """Return the stage's groups; several data ranks or holders require packing."""
    plan, found = partition.plan, []
    stages = {(r, s): stage for r, s, stage in plan.stages()}
    for name, leaf_ids in partition.stages[key].groups.items():
        holders = partition.holders[name]
        packed = len(holders) > 1 or stages[key].mesh.data > 1
        counts = [len(stages[holder].devices) for holder in holders]
        found.append(
            GradientGroup(
                name,
                leaf_ids,
                math.lcm(*counts) if packed else 0,
                owned=key == next(holder for holder in holders if holder[0] == key[0]),
                shared=len(holders) > 1,
                is_exact=is_exact(name, [stages[holder] for holder in holders]),
            )
        )
    return tuple(found)
