# SPDX-License-Identifier: Apache-2.0
"""Searching the fastest programs of a plan by simulation, under memory limits.

Owns the candidates and the hill climb. First all named schedules that the plan's
devices allow, and greedy lists (`list_schedule.py`) with the real times; then, from
the best of them, launch-aheads one up or down, stage by stage, as long as it helps. So
the result is never slower than any named schedule that fits, in the simulator. Does
not own times, limits, memory (`memory.py`) or the judge (`simulator.py`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from hetjax.costs.costs import Costs
from hetjax.plans.plan import Plan
from hetjax.schedule.action import (
    UNTIED,
    Action,
    Op,
    Programs,
    StageKey,
    Tied,
    format_program,
)
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
from hetjax.schedule.memory import capacity_bytes, memory_uses
from hetjax.schedule.simulation import lane_of
from hetjax.schedule.simulator import simulate

Limits = Mapping[StageKey, int]
_MOST_SIMULATIONS, _MOST_ACTIONS = 200, 4_000_000


@dataclass(frozen=True, slots=True)
class _Candidate:
    plan: Plan
    lanes: Sequence[Sequence[Action]]
    generated: bool  # the plan's own schedule gives these lanes

    @property
    def num_cut(self) -> int:
        """How many microbatches, the last ones, have their backward in two halves."""
        halves = (a.key for lane in self.lanes for a in lane if a.op is Op.W)
        return max(Counter(halves).values(), default=0)


def searched(
    plan: Plan,
    costs: Costs,
    limits: Limits,
    *,
    split_limits: Limits | None = None,
    tied: Tied = UNTIED,
) -> Plan:
    """Return the plan with the fastest schedule found, as `programs` if need be.

    `limits` bounds the forwards in flight by stage; `split_limits` those of backwards
    in two halves (zero-bubble), which are tried only with it. If nothing fits in
    memory, the result does not either. The effort is bounded: fewer tries for large
    plans.
    """

    def judge(candidate: _Candidate) -> float:
        programs = lower_lanes(candidate.plan, candidate.lanes, tied)
        if costs.memory and not fits(programs, candidate.plan, costs):
            return float("inf")
        return simulate(programs, candidate.plan, costs).step_time_s

    best_s, best = _fastest(judge, _first_candidates(plan, costs, limits, split_limits))
    num_actions = 8 * sum(map(len, best.lanes))
    left = min(_MOST_SIMULATIONS, _MOST_ACTIONS // num_actions)
    while left > 0:
        allowed = split_limits if best.num_cut and split_limits else limits
        near = list(_neighbours(best, costs, allowed))[:left]
        left -= len(near)
        found_s, found = _fastest(judge, near) if near else (best_s, best)
        if found_s >= best_s:
            break
        best_s, best = found_s, found
    return _written(best, tied)


def fits(programs: Programs, plan: Plan, costs: Costs) -> bool:
    """Return whether every device has the memory that the programs need."""
    there = capacity_bytes(plan, costs)
    uses = memory_uses(programs, plan, costs)
    return all(use.total_bytes <= there[device] for device, use in uses.items())


def _fastest(
    judge: Callable[[_Candidate], float], candidates: Iterable[_Candidate]
) -> tuple[float, _Candidate]:
    judged = (
        (judge(candidate), n, candidate) for n, candidate in enumerate(candidates)
    )
    time_s, _, candidate = min(judged, key=lambda entry: entry[:2])
    return time_s, candidate


def _first_candidates(
    plan: Plan, costs: Costs, limits: Limits, split_limits: Limits | None
) -> Iterator[_Candidate]:
    if not _shares_devices(plan):
        for rule in RULES.values():
            yield _generated(with_rule(plan, costs, rule, limits))
        yield _generated(replace(plan, schedule="gpipe", programs={}))
    yield _generated(_by_default(plan, limits, "interleaved"))
    yield from _lists(plan, costs, limits, 0)
    if split_limits is not None:
        yield _generated(_by_default(plan, split_limits, "zero-bubble"))
        for num_cut in _cuts(plan):
            yield from _lists(plan, costs, split_limits, num_cut)


def _generated(plan: Plan) -> _Candidate:
    return _Candidate(plan, lane_orders(plan), True)


def _by_default(plan: Plan, limits: Limits, schedule: str) -> Plan:
    """1F1B's launch-aheads, as far as memory lets them.

    Zero-bubble lets every stage keep as much as the first, so the least limit counts.
    """
    plain = {(r, s): len(plan.replicas[r].stages) - s for r, s, _ in plan.stages()}
    if schedule == "zero-bubble":
        least = {r: min(v for k, v in limits.items() if k[0] == r) for r, _ in limits}
        limits = {key: least[key[0]] for key in limits}
    return with_launch_ahead(plan, plain, limits, schedule)


def _cuts(plan: Plan) -> list[int]:
    """How many backwards to cut in two: enough to fill the end, or all."""
    deepest = max(len(replica.stages) for replica in plan.replicas)
    most = _most_microbatches(plan)
    return sorted({min(deepest, most), min(2 * deepest, most), most})


def _most_microbatches(plan: Plan) -> int:
    return max(replica.num_microbatches for replica in plan.replicas)


def _lists(
    plan: Plan, costs: Costs, limits: Limits, num_cut: int
) -> Iterator[_Candidate]:
    """Greedy lists: with the exact rule's launch-aheads, some more, and all that fit.

    More than the rule's help only backwards cut in two, whose W can wait.
    """
    exact = with_rule(plan, costs, exact_delta, limits)
    aheads = {(r, s): stage.launch_ahead for r, s, stage in exact.stages()}
    for more in range(3 if num_cut else 1):
        raised = {key: ahead + more for key, ahead in aheads.items()}
        ahead = with_launch_ahead(plan, raised, limits)
        yield _listed(ahead, costs, limits, num_cut)
    yield _listed(with_launch_ahead(plan, limits, limits), costs, limits, num_cut)


def _listed(plan: Plan, costs: Costs, limits: Limits, num_cut: int) -> _Candidate:
    """A greedy list with the plan's launch-aheads and the real times."""
    lanes = []
    for r, replica in enumerate(plan.replicas):
        stages = range(len(replica.stages))
        devices = list(dict.fromkeys((x.node, x.devices) for x in replica.stages))
        halves = [_halves(plan, costs, (r, s), num_cut > 0) for s in stages]
        pipeline = Pipeline(
            forward_s=[costs.times[r, s].forward_s for s in stages],
            input_gradient_s=[half[0] for half in halves],
            weight_gradient_s=[half[1] for half in halves],
            hop_s=[hop_s(costs, (r, s), (r, s + 1)) for s in stages],
            lanes=[devices.index((x.node, x.devices)) for x in replica.stages],
            num_microbatches=replica.num_microbatches,
            num_cut=min(num_cut, replica.num_microbatches),
        )
        ahead = [stage.launch_ahead for stage in replica.stages]
        kept = [limits[r, s] for s in stages] if num_cut else ahead
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
    candidate: _Candidate, costs: Costs, limits: Limits
) -> Iterator[_Candidate]:
    """The same kind of schedule with one launch-ahead, or the cuts, changed by one."""
    plan = candidate.plan
    if plan.schedule == "gpipe":
        return
    num_cut = candidate.num_cut
    aheads = {(r, s): stage.launch_ahead for r, s, stage in plan.stages()}
    for key, ahead in aheads.items():
        for other in (ahead + 1, ahead - 1):
            if not 1 <= other <= limits[key]:
                continue
            changed = aheads | {key: other}
            near = with_launch_ahead(plan, changed, limits, plan.schedule)
            if candidate.generated:
                yield _generated(near)
            else:
                yield _listed(near, costs, limits, num_cut)
    if num_cut and not candidate.generated:
        for other in (num_cut + 1, num_cut - 1):
            if 1 <= other <= _most_microbatches(plan):
                yield _listed(plan, costs, limits, other)


def _written(candidate: _Candidate, tied: Tied) -> Plan:
    """The plan with its programs as text, unless its schedule generates them."""
    plan = candidate.plan
    if candidate.generated:
        return plan
    shares = _shares_devices(plan)
    schedule = "interleaved" if shares else "h1f1b"
    plan = _with_kept(plan, candidate, "zero-bubble" if candidate.num_cut else schedule)
    programs = lower_lanes(plan, candidate.lanes, tied)
    texts = {node: format_program(program) for node, program in programs.items()}
    return replace(plan, programs=texts)


def _with_kept(plan: Plan, candidate: _Candidate, schedule: str) -> Plan:
    """The plan with launch-aheads that its programs stay within, and not rising."""
    kept = _kept(candidate.lanes)
    most: dict[StageKey, int] = {}
    for r, replica in enumerate(plan.replicas):
        from_last = [kept[r, s] for s in reversed(range(len(replica.stages)))]
        for s, ahead in enumerate(reversed(list(accumulate(from_last, max)))):
            most[r, s] = ahead
    return with_launch_ahead(plan, most, most, schedule)


def _kept(lanes: Sequence[Sequence[Action]]) -> dict[StageKey, int]:
    """Return the most forwards in flight of every stage."""
    most: dict[StageKey, int] = {}
    now: dict[StageKey, int] = {}
    for lane in lanes:
        for action in lane:
            change = {Op.F: 1, Op.B: -1, Op.W: -1}.get(action.op, 0)
            now[action.key] = now.get(action.key, 0) + change
            most[action.key] = max(most.get(action.key, 1), now[action.key])
    return most


def _shares_devices(plan: Plan) -> bool:
    lanes = lane_of(plan)
    return len(set(lanes.values())) < len(lanes)
