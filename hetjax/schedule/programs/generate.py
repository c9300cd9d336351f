# SPDX-License-Identifier: Apache-2.0
"""Generates the order in which stages compute their microbatches, per order rule.

Owns the generators and the in-flight limit of each rule: GPipe, 1F1B, interleaved 1F1B,
zero-bubble and evaluation. Does not own launch-aheads that suit given times
(`launch_ahead.py`), communication, reduction or buffers (`lower.py`).

Interleaved 1F1B follows Megatron-LM (arXiv 2104.04473). Stage i is on lane i mod P, so
each of P lanes has V chunks. Microbatches pass in rounds of P: first one round through
all chunks of a lane, then the next round. Lane p computes 2 (P - p - 1) + (V - 1) P
forwards before its first backward; these and the next forward are in flight together.

In terms of launch-aheads, whose default on the last chunk is P - p, rounds have G
microbatches, and (V - 1) G + 2 K - 1 forwards are in flight, with K the launch-ahead of
the last chunk. That cannot block for any K that does not rise: one round at a time,
with its earlier chunks whole and its last chunk one microbatch at a time, stays within
the limit. Other ways to share devices have no such rule.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import assert_never

from hetjax.errors import BadInput
from hetjax.plans.plan import Plan, Replica
from hetjax.plans.schedules import SCHEDULES
from hetjax.schedule.programs.action import Action, Op, StageKey
from hetjax.schedule.programs.list_schedule import (
    MicrobatchRounds,
    Pipeline,
    list_schedule,
)

ComputeOrder = tuple[tuple[Op, int], ...]  # (op, microbatch)
_MOST_KEPT = 256  # microbatches of an order that is kept: about 65 kB


def one_f_one_b(
    num_stages: int, stage: int, num_microbatches: int, launch_ahead: int
) -> ComputeOrder:
    """Return launch_ahead - 1 forwards, then F and B in turn, then the remaining B.

    If launch_ahead is the number of microbatches, this is GPipe. The last stage never
    waits between F and B, so it fuses them.
    """
    assert 0 <= stage < num_stages and launch_ahead >= 1
    if stage == num_stages - 1:
        return tuple((Op.FB, m) for m in range(num_microbatches))
    warm_up = min(launch_ahead - 1, num_microbatches)
    order = [(Op.F, m) for m in range(warm_up)]
    for m in range(num_microbatches):
        if m + warm_up < num_microbatches:
            order.append((Op.F, m + warm_up))
        order.append((Op.B, m))
    return tuple(order)


def in_flight_limit(plan: Plan, replica: int, stage: int) -> int:
    """Return how many forwards of a stage may wait for the end of their backward.

    Zero-bubble postpones weight gradients: every stage has the first stage's limit
    under 1F1B. Rounds of interleaving need up to twice the limit of 1F1B.
    """
    held = plan.replicas[replica]
    order = SCHEDULES[plan.schedule].order
    if order == "gpipe":
        return held.num_microbatches
    if order == "interleaved" and rounds_of(held):
        return _in_rounds(held.stages[stage].launch_ahead)
    return held.stages[0 if order == "zero-bubble" else stage].launch_ahead


def lane_orders(plan: Plan) -> list[Sequence[Action]]:
    """Return the compute order of every lane, that is, of stages on the same devices.

    Raises BadInput for an unknown schedule.
    """
    if plan.schedule not in SCHEDULES:
        raise BadInput(
            got=f"schedule = {plan.schedule!r}",
            allowed=f"one of {', '.join(SCHEDULES)}",
            fix='write "schedule": "1f1b" in the plan',
        )
    order = SCHEDULES[plan.schedule].order
    if order == "interleaved" or order == "zero-bubble":
        trained = dict.fromkeys(r for r, _, _ in plan.stages())
        return [lane for r in trained for lane in _listed(plan, r)]
    if order == "gpipe" or order == "1f1b":
        return [_stage_order(plan, r, s) for r, s, _ in plan.stages()]
    assert_never(order)


def _stage_order(plan: Plan, r: int, s: int) -> tuple[Action, ...]:
    replica = plan.replicas[r]
    shape = len(replica.stages), s, replica.num_microbatches
    limit = in_flight_limit(plan, r, s)
    if replica.num_microbatches > _MOST_KEPT:
        return _order(r, shape, limit)
    return _kept_order(r, shape, limit)


def _order(
    replica: int, shape: tuple[int, int, int], launch_ahead: int
) -> tuple[Action, ...]:
    stage, order = shape[1], one_f_one_b(*shape, launch_ahead)
    return tuple(Action(op, replica, stage, m) for op, m in order)


_kept_order = lru_cache(maxsize=256)(_order)  # a search orders many similar plans


def by_stage(orders: Iterable[Sequence[Action]]) -> dict[StageKey, list[Action]]:
    """Return the actions of every stage, taken from those of its lane."""
    stages: dict[StageKey, list[Action]] = defaultdict(list)
    for order in orders:
        for action in order:
            stages[action.key].append(action)
    return dict(sorted(stages.items()))


def _listed(plan: Plan, r: int) -> list[Sequence[Action]]:
    """List-schedule a replica in unit time: F = I = W = 1, no time on links."""
    replica = plan.replicas[r]
    ones = [1.0] * len(replica.stages)
    schedule = SCHEDULES[plan.schedule]
    num_cut = replica.num_microbatches if schedule.splits else 0
    pipeline = Pipeline(
        forward_s=ones,
        backward_s=[2.0] * len(ones),
        input_gradient_s=ones,
        weight_gradient_s=ones,
        hop_s=[0.0] * len(ones),
        lanes=lanes_of(replica),
        num_microbatches=replica.num_microbatches,
        num_cut=[num_cut] * len(ones),
    )
    kept = [in_flight_limit(plan, r, s) for s in range(len(ones))]
    rounds = rounds_of(replica) if schedule.order == "interleaved" else None
    ahead = kept if rounds else [stage.launch_ahead for stage in replica.stages]
    lanes = list_schedule(pipeline, ahead, kept, rounds)
    return [[Action(op, r, s, m) for s, op, m in lane] for lane in lanes]


def evaluation_actions(plan: Plan) -> dict[StageKey, list[Action]]:
    """Return one E per microbatch, in order, for every stage."""
    return {
        (r, s): [
            Action(Op.E, r, s, m) for m in range(plan.replicas[r].num_microbatches)
        ]
        for r, s, _ in plan.stages()
    }


def lanes_of(replica: Replica) -> list[int]:
    """Return a number per stage; stages with equal numbers share devices."""
    places = [(stage.node, stage.devices) for stage in replica.stages]
    devices = list(dict.fromkeys(places))
    return [devices.index(place) for place in places]


def rounds_of(replica: Replica) -> MicrobatchRounds | None:
    """Return the rounds of a replica, None if its stages do not cycle over lanes."""
    lanes = lanes_of(replica)
    num_lanes, num_stages = max(lanes) + 1, len(lanes)
    chunks = num_stages // num_lanes
    if chunks == 1 or lanes != [*range(num_lanes)] * chunks:
        return None
    aheads = [stage.launch_ahead for stage in replica.stages]
    earlier, last = aheads[:-num_lanes], aheads[-num_lanes:]
    size = min(num_lanes, _in_rounds(min(earlier)))
    return MicrobatchRounds(
        size=size,
        most_in_flight=tuple((chunks - 1) * size + _in_rounds(ahead) for ahead in last),
    )


def _in_rounds(launch_ahead: int) -> int:
    """Return how many forwards of one stage of such a replica may be in flight."""
    return 2 * launch_ahead - 1
