# SPDX-License-Identifier: Apache-2.0
"""The simplest of equally good plans, against all plans there are."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from hetjax.planner.model.simplicity import complexity, simplest, simplified
from hetjax.plans.plan import Plan, Replica, Stage


def plan(*replicas: tuple[int, int, int]) -> Plan:
    """Return a plan of replicas of (microbatches, their size, stages of one layer)."""
    return Plan(
        model="m",
        seq_len=8,
        global_batch=sum(count * size for count, size, _ in replicas),
        replicas=tuple(
            Replica(
                num_microbatches=count,
                microbatch_size=size,
                stages=tuple(
                    Stage(
                        node=f"{r}-{s}",
                        devices=(0,),
                        layers=(s, s + 1),
                        launch_ahead=stages - s,
                    )
                    for s in range(stages)
                ),
            )
            for r, (count, size, stages) in enumerate(replicas)
        ),
    )


@pytest.mark.parametrize(
    ("simpler", "other"),
    [
        (plan((4, 2, 1)), plan((4, 2, 2))),  # one stage fewer
        (plan((4, 2, 1), (4, 2, 1)), plan((8, 2, 2))),  # one cut fewer
        (plan((2, 4, 2)), plan((4, 2, 2))),  # fewer passes
    ],
)
def test_fewer_stages_cuts_and_passes_are_simpler(simpler: Plan, other: Plan):
    assert complexity(simpler) < complexity(other)
    plans = [other, simpler]
    assert simplest(plans, [1.0, 0.996]) == 1
    assert simplest(plans, [1.0, 0.994]) == 0  # slower by more than half a percent
    assert simplest(plans[:1] * 2, [0.999, 1.0]) == 1


@dataclass
class Judged:
    plan: Plan


def test_microbatches_are_as_large_as_they_can_be_without_a_loss():
    """Against all sizes of both replicas: the step takes as long as the slower one."""
    sizes = (1, 2, 4, 8)

    def time_s(plan: Plan) -> float:
        # each pass of the second takes time; one large pass of the first takes more
        one, other = plan.replicas
        return max(
            20.0 + (one.microbatch_size == 8) * 5, 10.0 + 0.5 * other.num_microbatches
        )

    def as_good(plan: Plan) -> Any:
        return Judged(plan) if time_s(plan) <= 20.0 * 1.005 else None

    def counts(found: Plan) -> Sequence[int]:
        return [r.num_microbatches for r in found.replicas]

    begin: Any = Judged(plan((16, 1, 1), (16, 1, 1)))
    found = simplified(begin, sizes, as_good)
    every = [
        plan((16 // one, one, 1), (16 // other, other, 1))
        for one, other in itertools.product(sizes, sizes)
    ]
    good = [p for p in every if time_s(p) <= 20.0 * 1.005]
    assert counts(found.plan) == counts(min(good, key=complexity)) == [4, 2]
