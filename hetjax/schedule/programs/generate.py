# SPDX-License-Identifier: Apache-2.0
"""Schedules: the order in which one stage computes its microbatches.

Owns the generators and the in-flight limit that goes with each schedule: GPipe, 1F1B
(H-1F1B is the same order with other launch-aheads), interleaved 1F1B, zero-bubble and
evaluation. Does not own launch-aheads that suit given times (`launch_ahead.py`),
communication, reduction or buffers (`lower.py`).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from hetjax.errors import BadInput
from hetjax.plans.plan import Plan
from hetjax.plans.schedules import SCHEDULES
from hetjax.schedule.programs.action import Action, Op, StageKey
from hetjax.schedule.programs.interleaved import in_rounds, lanes_of, rounds_of
from hetjax.schedule.programs.list_schedule import Pipeline, list_schedule

ComputeOrder = tuple[tuple[Op, int], ...]  # (op, microbatch)


def gpipe(num_stages: int, stage: int, num_microbatches: int) -> ComputeOrder:
    """Return all forwards, then all backwards; the last stage fuses them."""
    return one_f_one_b(num_stages, stage, num_microbatches, num_microbatches)


def one_f_one_b(
    num_stages: int, stage: int, num_microbatches: int, launch_ahead: int
) -> ComputeOrder:
    """Return launch_ahead - 1 forwards, then F and B in turn, then what is left of B.

    The last stage has nothing to wait for between F and B, so it fuses them.
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

    Zero-bubble lets weight gradients pile up, on every stage to what 1F1B needs on the
    first one; rounds of interleaving need up to twice what 1F1B does.
    """
    held = plan.replicas[replica]
    if plan.schedule == "gpipe":
        return held.num_microbatches
    if plan.schedule == "interleaved" and rounds_of(held):
        return in_rounds(held.stages[stage].launch_ahead)
    return held.stages[0 if SCHEDULES[plan.schedule].splits else stage].launch_ahead


def lane_orders(plan: Plan) -> list[list[Action]]:
    """Return the compute order of every lane, that is, of stages on the same devices.

    Raises BadInput for a schedule without a generator.
    """
    if plan.schedule not in SCHEDULES:
        raise BadInput(
            got=f"schedule = {plan.schedule!r}",
            allowed=f"one of {', '.join(SCHEDULES)}",
            fix='write "schedule": "1f1b" in the plan',
        )
    orders: list[list[Action]] = []
    for r, replica in enumerate(plan.replicas):
        if SCHEDULES[plan.schedule].shares:
            orders += _listed(plan, r)
            continue
        for s, stage in enumerate(replica.stages):
            shape = len(replica.stages), s, replica.num_microbatches
            order = (
                gpipe(*shape)
                if plan.schedule == "gpipe"
                else one_f_one_b(*shape, stage.launch_ahead)
            )
            orders.append([Action(op, r, s, m) for op, m in order])
    return orders


def by_stage(orders: Iterable[Sequence[Action]]) -> dict[StageKey, list[Action]]:
    """Return the actions of every stage, out of those of its lane."""
    stages: dict[StageKey, list[Action]] = defaultdict(list)
    for order in orders:
        for action in order:
            stages[action.key].append(action)
    return dict(sorted(stages.items()))


def _listed(plan: Plan, r: int) -> list[list[Action]]:
    """List-schedule a replica in unit time: F = I = W = 1, no time on links."""
    replica = plan.replicas[r]
    ones = [1.0] * len(replica.stages)
    num_cut = replica.num_microbatches if SCHEDULES[plan.schedule].splits else 0
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
    rounds = rounds_of(replica) if plan.schedule == "interleaved" else None
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
