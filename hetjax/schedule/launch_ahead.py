# SPDX-License-Identifier: Apache-2.0
"""Computes launch-aheads that suit the links and the stages of a plan (H-1F1B).

Owns the rules, from the last stage (launch-ahead 1) to the first: each hop adds a
delta. Little's law demands K_s t >= t_s + 2 c_s + K_(s+1) t with t the slowest stage's
time for a microbatch and c_s the hop's, hence delta = 1 + ceil(2 c / t) (our
derivation). HARP (arXiv 2509.24859) considers only hops between sub-clusters and rounds
by thresholds; plain 1F1B has delta 1.

Memory caps the launch-aheads of a rule. Consecutive stages that are all at a cap take
turns, so their times add up. `spread` distributes the forwards that fit over all
stages: by the same law a cycle of T needs R_s / T in flight at stage s, where R_s is
the time of a microbatch in stage s and beyond: t_s + 2 c_s + R_(s+1). The least T that
the caps allow, or a little more, gives the launch-aheads (our derivation).

Does not own the order of actions (`programs/generate.py`) nor times and bytes
(`costs/`).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetjax.costs.costs import Costs, StageMemory
from hetjax.plans.plan import Plan
from hetjax.schedule.programs.action import UNTIED, StageKey, Tied
from hetjax.schedule.simulated import simulated
from hetjax.schedule.simulation.result import Lane, lane_of

# (hop seconds, slowest stage's seconds, whether the hop leaves the node) -> delta
Rule = Callable[[float, float, bool], int]


def plain_delta(hop_s: float, slowest_s: float, crossing: bool) -> int:
    """Return the delta of 1F1B, which ignores times."""
    return 1


def exact_delta(hop_s: float, slowest_s: float, crossing: bool) -> int:
    """Return the least delta that keeps the slowest stage busy."""
    return int(exact_deltas(hop_s, slowest_s))


def exact_deltas(hop_s: ArrayLike, slowest_s: ArrayLike) -> NDArray[np.int64]:
    """Return `exact_delta` of many hops at once; the arguments broadcast."""
    hops_s, each_s = np.asarray(hop_s, np.float64), np.asarray(slowest_s, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        round_trips = np.where(each_s == 0, 0.0, 2 * hops_s / each_s)
    # values that are equal up to rounding count as equal; no pipeline hides more
    round_trips = np.minimum(round_trips, _MOST_DELTA) - 1e-9
    return 1 + np.ceil(round_trips).astype(np.int64)


def harp_delta(hop_s: float, slowest_s: float, crossing: bool) -> int:
    """Return the delta of HARP's released planner."""
    if not crossing or hop_s < slowest_s / 10:
        return 1
    return 2 if hop_s < slowest_s / 2 else 3


_MOST_DELTA = 2**20
SLACKS = (1.0, 1.3)  # of `spread`; compared with all launch-aheads of small plans
_MOST_FORWARDS = 5_000  # of a plan under every rule
RULES: Mapping[str, Rule] = {
    "1f1b": plain_delta,
    "h1f1b": exact_delta,
    "harp": harp_delta,
}


def from_deltas(deltas: Sequence[int]) -> tuple[int, ...]:
    """Return launch-aheads, first stage first, from the hops' deltas in this order."""
    return tuple(accumulate(reversed(deltas), initial=1))[::-1]


def with_rule(
    plan: Plan, costs: Costs, rule: Rule, limits: Mapping[StageKey, int]
) -> Plan:
    """Return the plan as h1f1b with a rule's launch-aheads, none above its limit."""
    return with_launch_ahead(plan, _asked(plan, costs, rule), limits)


def _asked(plan: Plan, costs: Costs, rule: Rule) -> dict[StageKey, int]:
    """Return the launch-aheads of a rule, regardless of memory."""
    aheads = {}
    for r, replica in enumerate(plan.replicas):
        num_stages = len(replica.stages)
        slowest_s = max(microbatch_s(plan, costs, (r, s)) for s in range(num_stages))
        nodes = [stage.node for stage in replica.stages]
        deltas = [
            rule(hop_s(costs, (r, s), (r, s + 1)), slowest_s, nodes[s] != nodes[s + 1])
            for s in range(num_stages - 1)
        ]
        for s, ahead in enumerate(from_deltas(deltas)):
            aheads[r, s] = min(ahead, replica.num_microbatches)
    return aheads


def with_launch_ahead(
    plan: Plan,
    aheads: Mapping[StageKey, int],
    limits: Mapping[StageKey, int],
    schedule: str = "h1f1b",
) -> Plan:
    """Return the plan with these launch-aheads, capped and not rising."""
    replicas = []
    for r, replica in enumerate(plan.replicas):
        keys = [(r, s) for s in range(len(replica.stages))]
        capped = accumulate((min(aheads[key], limits[key]) for key in keys), min)
        stages = [
            replace(stage, launch_ahead=ahead)
            for stage, ahead in zip(replica.stages, capped, strict=True)
        ]
        replicas.append(replace(replica, stages=tuple(stages)))
    return replace(plan, schedule=schedule, replicas=tuple(replicas), programs={})


def spread(
    plan: Plan, costs: Costs, limits: Mapping[StageKey, int], *, slack: float = 1.0
) -> Plan:
    """Return the plan as h1f1b with launch-aheads for `slack` times the least cycle
    that the limits allow."""
    aheads = {}
    for r, replica in enumerate(plan.replicas):
        keys = [(r, s) for s in range(len(replica.stages))]
        each_S = np.array([microbatch_s(plan, costs, key) for key in keys])
        hops_S = np.array([*(hop_s(costs, *hop) for hop in pairwise(keys)), 0.0])
        stays_S = np.cumsum((each_S + 2 * hops_S)[::-1])[::-1]
        most_S = np.minimum.accumulate([max(limits[key], 1) for key in keys])
        cycle_s = slack * max((stays_S / most_S).max(), each_S.max())
        asked_S = np.ceil(stays_S / (cycle_s or 1.0) - 1e-9).clip(1)
        for key, asked in zip(keys, asked_S, strict=True):
            aheads[key] = min(int(asked), replica.num_microbatches)
    return with_launch_ahead(plan, aheads, limits)


def fitted(
    plan: Plan, costs: Costs, limits: Mapping[StageKey, int], tied: Tied = UNTIED
) -> Plan:
    """Return the plan under the rule with the fastest simulated step, on a tie under
    the exact rule. If simulation takes long, use the exact rule, or `spread` if memory
    caps the exact rule."""
    asked = _asked(plan, costs, exact_delta)
    exact = with_launch_ahead(plan, asked, limits)
    capped = any(asked[key] > limits[key] for key in asked)
    if plan.num_forwards > _MOST_FORWARDS:
        return spread(plan, costs, limits) if capped else exact
    others = (plain_delta, harp_delta)
    plans = [exact, *(with_rule(plan, costs, rule, limits) for rule in others)]
    if capped:
        plans += [spread(plan, costs, limits, slack=slack) for slack in SLACKS]
    plans = list(dict.fromkeys(plans))
    if len(plans) == 1:
        return plans[0]
    return min(plans, key=lambda p: simulated(p, costs, tied).step_time_s)


def launch_limits(
    plan: Plan, costs: Costs, *, split: bool = False
) -> dict[StageKey, int]:
    """Return the forwards in flight that the memory of every stage's devices allows.

    With `split`, the count includes what a split backward may keep longer. Stages on
    the same devices get equal limits, or at least 1F1B's launch-ahead if that fits. The
    limit is at least 1, even if that does not fit: `simulation/memory.py` decides
    whether the final programs fit.
    """
    lanes: dict[Lane, list[StageKey]] = defaultdict(list)
    for key, lane in lane_of(plan).items():
        lanes[lane].append(key)
    limits = {}
    for keys in lanes.values():
        kept, left = _memory_in_flight(costs, keys, split)
        plain = {(r, s): len(plan.replicas[r].stages) - s for r, s in keys}
        fits = sum(kept[key] * plain[key] for key in keys) <= left
        equal = left / sum(kept.values()) if any(kept.values()) else math.inf
        for key in keys:
            most = max(equal, plain[key] if fits else 1)
            limits[key] = int(min(most, plan.replicas[key[0]].num_microbatches))
    return limits


def _memory_in_flight(
    costs: Costs, keys: Sequence[StageKey], split: bool
) -> tuple[dict[StageKey, int], float]:
    """Return the bytes per forward in flight of each stage, and the bytes available."""
    held = {key: costs.memory.get(key, StageMemory()) for key in keys}
    # a message may wait at its sender as long as its microbatch is in flight
    kept = {
        key: max(m.saved_bytes, m.half_saved_bytes * split) + m.output_bytes
        for key, m in held.items()
    }
    static = sum(m.static_bytes for m in held.values())
    # in addition: a dy that just arrived and its cut, a new dx and its cut
    passing = sum(2 * (m.output_bytes + m.input_bytes) for m in held.values())
    workspace = max(m.workspace_bytes for m in held.values())
    there = costs.memory_bytes.get(keys[0], math.inf)
    return kept, there - static - passing - workspace


def microbatch_s(plan: Plan, costs: Costs, key: StageKey) -> float:
    """Return a stage's time for one microbatch, forward and backward."""
    times = costs.times[key]
    last = key[1] == len(plan.replicas[key[0]].stages) - 1
    return times.fused_s if last else times.forward_s + times.backward_s


def hop_s(costs: Costs, source: StageKey, target: StageKey) -> float:
    """Return the time of one message that shares its trunks with no other."""
    route = costs.routes.get((source, target))
    if route is None:
        return 0.0
    size = costs.message_bytes.get((source, target), 0.0)
    return route.latency_s + max(
        (size / costs.trunks[trunk] for trunk in route.trunks), default=0.0
    )
