# SPDX-License-Identifier: Apache-2.0
"""Defines the checks of a step, and what they find.

Owns these values, and the decision whose digest differs from the others', a function of
all digests. Does not own the computation of digests (`digests.py`), their transfer
(`gradient_sync.py`), nor the reaction to a disagreement (`hetjax/training/loop.py`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetjax.plans.plan import Group, StageKey

Digests = Mapping[Group, int]  # 64 bits of each gradient group


@dataclass(frozen=True, kw_only=True, slots=True)
class StepChecks:
    """The checks of a step: the same for all workers.

    A loss beyond `most_loss` is a spike; if `skips_spikes`, a spike changes nothing.
    `digests`: whether holders of a gradient group compare their numbers.
    """

    most_loss: float | None = None
    skips_spikes: bool = False
    digests: bool = False


NO_CHECKS = StepChecks()


@dataclass(frozen=True, kw_only=True, slots=True)
class Disagreement:
    """Holders of a gradient group whose bits should be equal but differ.

    `odd` are the holders that differ from more than half of them; empty if there is no
    such majority.
    """

    group: Group
    holders: Sequence[StageKey]
    odd: Sequence[StageKey]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageNumbers:
    """The findings on a stage's weights between two steps.

    `digests` are those of groups whose weights are equal to the last bit on all
    holders.
    """

    stage: StageKey
    is_finite: bool
    digests: Sequence[tuple[Group, int]]


def disagreements(digests: Mapping[StageKey, Digests]) -> tuple[Disagreement, ...]:
    """Return the groups for which two holders report different digests.

    Equal reports give equal results.
    """
    by_group: dict[Group, dict[StageKey, int]] = {}
    for stage in sorted(digests):
        for group, digest in digests[stage].items():
            by_group.setdefault(group, {})[stage] = digest
    return tuple(
        Disagreement(group=group, holders=tuple(of), odd=_odd(of))
        for group, of in by_group.items()
        if len({*of.values()}) > 1
    )


def _odd(digests: Mapping[StageKey, int]) -> tuple[StageKey, ...]:
    ((most, count),) = Counter(digests.values()).most_common(1)
    if 2 * count <= len(digests):
        return ()
    return tuple(stage for stage, digest in digests.items() if digest != most)
