# SPDX-License-Identifier: Apache-2.0
"""What a step is checked for, and what its workers then know of their numbers.

Owns these values and the judgement whose digest differs from the others', a function of
all digests. Does not own how digests are made (`digests.py`), how they travel
(`gradient_sync.py`), nor what is done about a disagreement (`hetjax/training/loop.py`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetjax.plans.plan import Group, StageKey

Digests = Mapping[Group, int]  # 64 bits of each gradient group


@dataclass(frozen=True, kw_only=True, slots=True)
class StepChecks:
    """What a step is checked for: the same for all workers.

    A loss beyond `most_loss` is a spike, which changes nothing if it `skips_spikes`.
    `digests`: whether holders of a gradient group compare what they have.
    """

    most_loss: float | None = None
    skips_spikes: bool = False
    digests: bool = False


NO_CHECKS = StepChecks()


@dataclass(frozen=True, kw_only=True, slots=True)
class Disagreement:
    """Holders of a gradient group that should have the same bits, and have not.

    `odd` are those that differ from more than half of them; none where nobody can tell.
    """

    group: Group
    holders: Sequence[StageKey]
    odd: Sequence[StageKey]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageNumbers:
    """What is known of a stage's weights between two steps.

    `digests` are those of groups whose weights are equal to the last bit on all
    holders.
    """

    stage: StageKey
    is_finite: bool
    digests: Sequence[tuple[Group, int]]


def disagreements(digests: Mapping[StageKey, Digests]) -> tuple[Disagreement, ...]:
    """The groups of which two holders report unlike digests; whoever has the same
    reports gets the same."""
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
