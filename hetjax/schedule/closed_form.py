# SPDX-License-Identifier: Apache-2.0
"""Step times in closed form, as planners estimate them.

Owns the two published forms; t are the stages' times for a microbatch, c the hops'.
They rank plans well and are no bounds: unlike stages can be faster or slower
(`simulator.py` is the judge, `bound.py` what cannot be beaten).
"""

from collections.abc import Sequence


def hapt_step_s(
    stage_s: Sequence[float], hop_s: Sequence[float], num_microbatches: int
) -> float:
    """Return sum(t + 2 c) + (B - 1) max(t): every hop is paid there and back.

    The objective of Hapt (arXiv 2509.24859, version 1).
    """
    return sum(stage_s) + 2 * sum(hop_s) + (num_microbatches - 1) * max(stage_s)


def harp_step_s(
    stage_s: Sequence[float], hop_s: Sequence[float], num_microbatches: int
) -> float:
    """Return sum(t) + sum(c) + (B - 1) max(t, c), what HARP's planner prints.

    Hops count once, and the slowest of stages and hops sets the pace.
    """
    slowest_s = max(*stage_s, *hop_s, 0.0)
    return sum(stage_s) + sum(hop_s) + (num_microbatches - 1) * slowest_s
