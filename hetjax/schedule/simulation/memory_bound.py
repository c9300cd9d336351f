# SPDX-License-Identifier: Apache-2.0
"""What a plain 1F1B plan needs at most on every device, without its programs.

Owns that bound (our derivation), which says of most plans that they fit. What plans
need exactly is `memory.py`'s to say.

A stage of launch-ahead K keeps at most K forwards in flight, each with x, residuals and
y; y waits until its dy comes. It sends dx of microbatch m, which waits until the stage
before, of launch-ahead H, is known to have it: H forwards later, once the x of
microbatch m + H is there, whose SEND comes after the RECV of that dx in every program.
So forwards in flight and dx that wait are never more than H + 1 together. Beside them
there is at one time either a second x or dy, from which the first is joined, or the cut
of y, or dy with dx; the cut of dx comes when its x is gone.
"""

from hetjax.costs.costs import Costs, StageMemory
from hetjax.plans.plan import Plan
from hetjax.schedule.programs.generate import in_flight_limit


def surely_fits(plan: Plan, costs: Costs) -> bool:
    """Say whether all stages fit by the bound; False if that is not known.

    Of a plan each stage of which has its devices to itself, whose launch-aheads do not
    rise, in an order of one_f_one_b (`programs/generate.py`).
    """
    return all(
        most_bytes(plan, costs, r, s) <= costs.memory_bytes.get((r, s), float("inf"))
        for r, s, _ in plan.stages()
    )


def most_bytes(plan: Plan, costs: Costs, r: int, s: int) -> int:
    """Return what a stage of such a plan needs at most on each of its devices."""
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
