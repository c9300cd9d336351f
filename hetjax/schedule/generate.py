# SPDX-License-Identifier: Apache-2.0
"""Schedules: the order in which one stage computes its microbatches.

Owns the generators (GPipe, 1F1B, evaluation) and the in-flight limit that goes with
each schedule. Does not own communication, reduction or buffers (`lower.py`).
"""

from hetjax.errors import BadInput
from hetjax.plans.plan import Plan
from hetjax.plans.validation import SCHEDULES
from hetjax.schedule.action import Action, Op, StageKey

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
    """Return how many forwards of a stage may wait for their backward at once."""
    if plan.schedule == "gpipe":
        return plan.replicas[replica].num_microbatches
    return plan.replicas[replica].stages[stage].launch_ahead


def compute_actions(plan: Plan) -> dict[StageKey, list[Action]]:
    """Return the compute order of every stage by the plan's schedule.

    Raises BadInput for a schedule without a generator.
    """
    if plan.schedule not in SCHEDULES:
        raise BadInput(
            got=f"schedule = {plan.schedule!r}",
            allowed=f"one of {', '.join(SCHEDULES)}",
            fix='write "schedule": "1f1b" in the plan',
        )
    orders: dict[StageKey, list[Action]] = {}
    for r, s, stage in plan.stages():
        shape = len(plan.replicas[r].stages), s, plan.replicas[r].num_microbatches
        order = (
            gpipe(*shape)
            if plan.schedule == "gpipe"
            else one_f_one_b(*shape, stage.launch_ahead)
        )
        orders[r, s] = [Action(op, r, s, m) for op, m in order]
    return orders


def evaluation_actions(plan: Plan) -> dict[StageKey, list[Action]]:
    """Return one E per microbatch, in order, for every stage."""
    return {
        (r, s): [
            Action(Op.E, r, s, m) for m in range(plan.replicas[r].num_microbatches)
        ]
        for r, s, _ in plan.stages()
    }
