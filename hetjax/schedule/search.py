# SPDX-License-Identifier: Apache-2.0
"""Searching the fastest programs of a plan by simulation, under memory limits.

Owns the candidates and the hill climb. First all named schedules and greedy lists
(`list_schedule.py`) with the real times; then, from the best of them, launch-aheads
one up or down, stage by stage, as long as it helps. So the result is never slower than
any named schedule in the simulator. Does not own times, limits or the judge.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetjax.costs.costs import Costs
from hetjax.plans.plan import Plan
from hetjax.schedule.action import UNTIED, Action, StageKey, Tied, format_program
from hetjax.schedule.generate import lane_orders
from hetjax.schedule.launch_ahead import (
    RULES,
    exact_delta,
    hop_s,
    with_launch_ahead,
    with_rule,
)
from hetjax.schedule.list_schedule import Pipeline, list_schedule
from hetjax.schedule.lower import lower_lanes
from hetjax.schedule.simulator import simulate

_Lanes = list[list[Action]]


@dataclass(frozen=True, slots=True)
class _Candidate:
    plan: Plan
    lanes: _Lanes
    generated: bool  # the plan's own schedule gives these lanes


def searched(
    plan: Plan,
    costs: Costs,
    limits: Mapping[StageKey, int],
    *,
    split: bool,
    tied: Tied = UNTIED,
    max_simulations: int = 200,
) -> Plan:
    """Return the plan with the fastest schedule found, as `programs` if need be.

    `split` also tries backwards cut in two (zero-bubble). `limits` bounds the forwards
    in flight by stage.
    """

    def judge(candidate: _Candidate) -> float:
        programs = lower_lanes(candidate.plan, candidate.lanes, tied)
        return simulate(programs, candidate.plan, costs).step_time_s

    best_s, best = _fastest(judge, _first_candidates(plan, costs, limits, split))
    left = max_simulations
    while left > 0:
        near = list(_neighbours(best, costs, limits))[:left]
        left -= len(near)
        found_s, found = _fastest(judge, near) if near else (best_s, best)
        if found_s >= best_s:
            break
        best_s, best = found_s, found
    return _written(best, tied)


def _fastest(
    judge: Callable[[_Candidate], float], candidates: Iterable[_Candidate]
) -> tuple[float, _Candidate]:
    judged = (
        (judge(candidate), n, candidate) for n, candidate in enumerate(candidates)
    )
    time_s, _, candidate = min(judged, key=lambda entry: entry[:2])
    return time_s, candidate


def _first_candidates(
    plan: Plan, costs: Costs, limits: Mapping[StageKey, int], split: bool
) -> Iterator[_Candidate]:
    for rule in RULES.values():
        ruled = with_rule(plan, costs, rule, limits)
        yield _Candidate(ruled, lane_orders(ruled), True)
    if all(
        limits[r, s] >= plan.replicas[r].num_microbatches for r, s, _ in plan.stages()
    ):
        gpipe = replace(plan, schedule="gpipe", programs={})
        yield _Candidate(gpipe, lane_orders(gpipe), True)
    exact = with_rule(plan, costs, exact_delta, limits)
    widest = with_launch_ahead(plan, limits, limits)
    for ahead in (exact, widest):
        yield _listed(ahead, costs, limits, split=False)
        if split:
            yield _listed(ahead, costs, limits, split=True)
    if split:
        yield _unit_zero_bubble(plan, limits)


def _unit_zero_bubble(plan: Plan, limits: Mapping[StageKey, int]) -> _Candidate:
    """Zero-bubble as its generator makes it, as far as memory lets it."""
    plain = {(r, s): len(plan.replicas[r].stages) - s for r, s, _ in plan.stages()}
    least = {
        (r, s): min(limits[r, x] for x in range(len(plan.replicas[r].stages)))
        for r, s, _ in plan.stages()
    }
    capped = replace(with_launch_ahead(plan, plain, least), schedule="zero-bubble")
    return _Candidate(capped, lane_orders(capped), True)


def _listed(
    plan: Plan, costs: Costs, limits: Mapping[StageKey, int], *, split: bool
) -> _Candidate:
    """A greedy list with the plan's launch-aheads and the real times."""
    lanes: _Lanes = []
    for r, replica in enumerate(plan.replicas):
        stages = range(len(replica.stages))
        times = [costs.times[r, s] for s in stages]
        halves = [_halves(plan, costs, (r, s), split) for s in stages]
        pipeline = Pipeline(
            forward_s=[t.forward_s for t in times],
            input_gradient_s=[half[0] for half in halves],
            weight_gradient_s=[half[1] for half in halves],
            hop_s=[hop_s(costs, (r, s), (r, s + 1)) for s in stages],
            lanes=list(stages),
            num_microbatches=replica.num_microbatches,
            split=split,
        )
        ahead = [stage.launch_ahead for stage in replica.stages]
        kept = [limits[r, s] for s in stages] if split else ahead
        for lane in list_schedule(pipeline, ahead, kept):
            lanes.append([Action(op, r, s, m) for s, op, m in lane])
    return _Candidate(plan, lanes, False)


def _halves(
    plan: Plan, costs: Costs, key: StageKey, split: bool
) -> tuple[float, float]:
    """Seconds of I and W; not split, of B and nothing (FB less F on the last stage)."""
    times = costs.times[key]
    if split:
        return times.input_gradient_s, times.weight_gradient_s
    last = key[1] == len(plan.replicas[key[0]].stages) - 1
    return (times.fused_s - times.forward_s if last else times.backward_s), 0.0


def _neighbours(
    candidate: _Candidate, costs: Costs, limits: Mapping[StageKey, int]
) -> Iterator[_Candidate]:
    """The same kind of schedule with one launch-ahead changed by one."""
    plan = candidate.plan
    aheads = {(r, s): stage.launch_ahead for r, s, stage in plan.stages()}
    split = any(action.op == "W" for lane in candidate.lanes for action in lane)
    for key, ahead in aheads.items():
        for other in (ahead + 1, ahead - 1):
            if not 1 <= other <= limits[key]:
                continue
            changed = with_launch_ahead(plan, aheads | {key: other}, limits)
            if split or not candidate.generated:
                yield _listed(changed, costs, limits, split=split)
            else:
                yield _Candidate(changed, lane_orders(changed), True)


def _written(candidate: _Candidate, tied: Tied) -> Plan:
    """The plan with its programs as text, unless its schedule generates them."""
    plan = candidate.plan
    if candidate.generated:
        return plan
    kept = _kept(candidate.lanes)
    if any(action.op == "W" for lane in candidate.lanes for action in lane):
        # under zero-bubble the first stage's launch-ahead bounds them all
        most = {
            key: max(kept[key[0], s] for s in range(len(plan.replicas[key[0]].stages)))
            for key in kept
        }
        plan = replace(with_launch_ahead(plan, most, most), schedule="zero-bubble")
    programs = lower_lanes(plan, candidate.lanes, tied)
    texts = {node: format_program(program) for node, program in programs.items()}
    return replace(plan, programs=texts)


def _kept(lanes: Sequence[Sequence[Action]]) -> dict[StageKey, int]:
    """Return the most forwards in flight of every stage."""
    most: dict[StageKey, int] = {}
    now: dict[StageKey, int] = {}
    for lane in lanes:
        for action in lane:
            change = {"F": 1, "B": -1, "W": -1}.get(action.op, 0)
            now[action.key] = now.get(action.key, 0) + change
            most[action.key] = max(most.get(action.key, 1), now[action.key])
    return most
