# SPDX-License-Identifier: Apache-2.0
"""Derives the plan in which surviving replicas train on the samples of lost replicas.

Only the numbers of microbatches change, not cuts, meshes, microbatch sizes or
launch-aheads. So weights stay where they are, compiled programs stay valid, and no
stage has more forwards in flight. Lost replicas become idle. Owns which replicas
survive and the share of each. Does not own how workers apply the plan
(`runtime/execution/stage_runtime.py`), nor the requests to them (`runtime/control/`).
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import floor

from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.plans.schedules import SCHEDULES


def rerouted(plan: Plan, lost: Collection[str]) -> Plan | None:
    """Return the plan without the replicas that have a stage on a lost node.

    None if no replica survives, or if no microbatch counts make up the global batch.
    Otherwise the shares minimise the largest `slowdown` of a replica.
    """
    left = [not _is_on(replica, lost) for replica in plan.replicas]
    if all(left):
        return plan
    survivors = [r for r, is_left in zip(plan.replicas, left, strict=True) if is_left]
    counts = balanced(survivors, plan.global_batch)
    if not survivors or counts is None:
        return None
    taken = iter(counts)
    return with_microbatches(plan, [next(taken) if is_left else 0 for is_left in left])


def with_microbatches(plan: Plan, counts: Sequence[int]) -> Plan:
    """Return the plan with these numbers of microbatches, by replica; 0: it is idle.

    `programs` of the plan hold only for its own numbers, so they are dropped and all
    programs are generated. Under GPipe all microbatches were in flight; the new plan
    may have no more in flight than that, so it becomes 1f1b with that launch-ahead.
    """
    own = [replica.num_microbatches for replica in plan.replicas]
    if list(counts) == own:
        return plan
    replicas = [
        replace(replica, num_microbatches=count)
        for replica, count in zip(plan.replicas, counts, strict=True)
    ]
    schedule = plan.schedule
    if SCHEDULES[schedule].order == "gpipe":
        schedule = "1f1b"
        replicas = [_ahead(*pair) for pair in zip(replicas, own, strict=True)]
    return replace(
        plan,
        replicas=tuple(replicas),
        schedule=schedule,
        programs={},
        predicted=None,
    )


def slowdown(replica: Replica, num_microbatches: int) -> Fraction:
    """Return the replica's time for `num_microbatches`, relative to its planned time.

    A pipeline of S stages takes as long as M + S - 1 microbatches of its slowest stage.
    All replicas of a plan take about one step's time, so slowdowns are comparable.
    """
    filling = len(replica.stages) - 1
    return Fraction(num_microbatches + filling, replica.num_microbatches + filling)


def balanced(replicas: Sequence[Replica], num_samples: int) -> tuple[int, ...] | None:
    """Return microbatch counts, each at least 1, with `num_samples` samples in all.

    They minimise the largest slowdown. None if there are no such numbers.
    """
    most = num_samples - sum(replica.microbatch_size for replica in replicas)
    if most < 0:
        return None
    limits = sorted(
        {
            slowdown(replica, 1 + extra)
            for replica in replicas
            for extra in range(most // replica.microbatch_size + 1)
        }
    )
    search = _Search(replicas, most)
    at = bisect_left(limits, True, key=lambda limit: search.reaches(limit))
    return None if at == len(limits) else search.counts(limits[at])


@dataclass(frozen=True, slots=True)
class _Search:
    """The sums of samples that the replicas can reach, as bits of an integer.

    Each replica has one microbatch already; `most` counts the samples beyond these.
    """

    replicas: Sequence[Replica]
    most: int

    def reaches(self, limit: Fraction) -> bool:
        """Return whether all samples fit with no slowdown above the limit."""
        return bool(self._sums(limit)[-1] >> self.most & 1)

    def counts(self, limit: Fraction) -> tuple[int, ...]:
        """Return counts that reach all samples within the limit: from the last replica
        to the first, each as large as possible."""
        rest, found = self.most, list[int]()
        steps = zip(self.replicas, pairwise(self._sums(limit)), strict=True)
        for replica, (before, _) in reversed(list(steps)):
            size = replica.microbatch_size
            extra = min(_extra(replica, limit), rest // size)
            while not before >> (rest - extra * size) & 1:
                extra -= 1
            found.append(1 + extra)
            rest -= extra * size
        return tuple(reversed(found))

    def _sums(self, limit: Fraction) -> list[int]:
        """Return the sums that the first 0, 1, ... replicas reach."""
        sums = [1]
        for replica in self.replicas:
            sums.append(self._with(sums[-1], replica, _extra(replica, limit)))
        return sums

    def _with(self, reached: int, replica: Replica, extra: int) -> int:
        """Add up to `extra` microbatches of the replica, in parts of 1, 2, 4, ..."""
        if extra < 0:
            return 0
        part, within = 1, (1 << self.most + 1) - 1
        while extra and part * replica.microbatch_size <= self.most:
            taken = min(part, extra)
            reached |= reached << taken * replica.microbatch_size & within
            part, extra = 2 * part, extra - taken
        return reached


def _extra(replica: Replica, limit: Fraction) -> int:
    """Return how many microbatches beyond the first the limit allows; -1 if
    it does not allow even the first."""
    filling = len(replica.stages) - 1
    slots = limit * (replica.num_microbatches + filling)
    return floor(slots) - filling - 1


def _is_on(replica: Replica, nodes: Collection[str]) -> bool:
    return any(stage.node in nodes for stage in replica.stages)


def _ahead(replica: Replica, launch_ahead: int) -> Replica:
    def ahead(stage: Stage) -> Stage:
        return replace(stage, launch_ahead=launch_ahead)

    return replace(replica, stages=tuple(map(ahead, replica.stages)))
