# SPDX-License-Identifier: Apache-2.0
"""Computes how long each kind of device works in a step, as measured and as predicted.

One step time cannot show which kind of device is slower than predicted; the seconds of
its stages can. Owns these sums over the stages of a kind. Does not own the measuring
(`costs/slowness/step_times.py`), a stage's predicted times (`costs/stage_times.py`),
nor what follows from the differences (`beliefs.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Cluster
from hetjax.costs.certainty.elasticities import Work
from hetjax.costs.costs import Costs
from hetjax.costs.slowness.step_times import Part, StepTimes
from hetjax.plans.plan import Plan

_TIMES = {
    "F": "forward_s",
    "B": "backward_s",
    "FB": "fused_s",
    "I": "input_gradient_s",
    "W": "weight_gradient_s",
    "UPDATE": "update_s",
}


def measured_parts(steps: Sequence[StepTimes]) -> dict[Part, float]:
    """Return the median seconds of each part that all these steps have."""
    in_all = set.intersection(*({*times.parts} for times in steps)) if steps else set()
    return {part: median(t.parts[part] for t in steps) for part in sorted(in_all)}


def predicted_parts(
    parts: Iterable[Part], plan: Plan, costs: Costs
) -> dict[Part, float]:
    """Return the predicted seconds of these parts, as far as they are known."""
    found: dict[Part, float] = {}
    for r, s, kind in parts:
        times, name = costs.times.get((r, s)), _TIMES.get(kind)
        seconds = times and name and getattr(times, name)
        if seconds:
            repeats = 1 if kind == "UPDATE" else plan.replicas[r].num_microbatches
            found[r, s, kind] = repeats * seconds
    return found


def work_of(
    seconds: Mapping[Part, float], plan: Plan, cluster: Cluster
) -> dict[Work, float]:
    """Return the sum of the parts' seconds for each kind of device and of action."""
    kinds = {
        (r, s): canonical_name(cluster.node(stage.node).device)
        for r, s, stage in plan.stages()
    }
    found: dict[Work, float] = {}
    for (r, s, kind), part_s in seconds.items():
        work = kinds[r, s], kind
        found[work] = found.get(work, 0.0) + part_s
    return found
