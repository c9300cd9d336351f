# SPDX-License-Identifier: Apache-2.0
"""Bounds from above the memory of a plain 1F1B plan, without its programs.

Owns that bound (our derivation), which shows for most plans that they fit. Does not own
the exact need (`memory.py`).

A stage of launch-ahead K keeps at most K forwards in flight, each with x, residuals and
y; y waits until its dy comes. The stage sends dx of microbatch m, which waits until the
stage before, of launch-ahead H, is known to have it: H forwards later, when the x of
microbatch m + H arrives, whose SEND comes after the RECV of that dx in every program.
So forwards in flight and waiting dx are together never more than H + 1. In addition
there is at one time either a second x or dy, from which the first is joined, or the cut
of y, or dy with dx; the cut of dx is made when its x is gone.
"""

from hetjax.costs.costs import Costs, StageMemory
from hetjax.plans.plan import Plan
from hetjax.schedule.programs.generate import in_flight_limit


def surely_fits(plan: Plan, costs: Costs) -> bool:
    """Return whether all stages fit by the bound; False means unknown.

    The plan's stages must not share devices, its launch-aheads must not rise, and its
    order must be that of `one_f_one_b` (`programs/generate.py`).
    """
    return all(
        most_bytes(plan, costs, r, s) <= costs.memory_bytes.get((r, s), float("inf"))
        for r, s, _ in plan.stages()
    )


def most_bytes(plan: Plan, costs: Costs, r: int, s: int) -> int:
    """Return an upper bound of a stage's bytes on each device, for such a plan."""
    held = costs.memory.get((r, s), StageMemory())
    first, last = s == 0, s == len(plan.replicas[r].stages) - 1
    received, sent = held.input_bytes * (not first), held.output_bytes * (not last)
    residuals = 0 if last else max(held.saved_bytes - received, 0)
    in_flight = _in_flight(plan, r, s)
    waiting = 0 if first else max(_in_flight(plan, r, s - 1) - in_flight, 0) + 1
    passing = sent + max(sent, received)
    flying = in_flight * (received + residuals + sent) + waiting * received + passing
    return held.static_bytes + max(flying + held.workspace_bytes, held.update_bytes)


def _in_flight(plan: Plan, r: int, s: int) -> int:
    replica = plan.replicas[r]
    if s == len(replica.stages) - 1:
        return 1
    return min(in_flight_limit(plan, r, s), replica.num_microbatches)
