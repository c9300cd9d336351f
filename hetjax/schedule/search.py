# SPDX-License-Identifier: Apache-2.0
"""A plan under another schedule, by its name, up to the fastest that is found.

Owns the names, the launch-aheads that come with each, and the search under memory
limits, by simulation. Its first candidates are all named schedules that the plan's
devices allow, and greedy lists (`programs/list_schedule.py`) with the real times; then,
from the best of them, launch-aheads and numbers of backwards in two halves go one up or
down, stage by stage, as long as it helps. There are two climbs, one of them without
halves. So the result is never slower than any named schedule that fits, in the
simulator. Does not own how launch-aheads are fitted (`launch_ahead.py`), memory
(`simulation/memory.py`) nor the judge (`simulation/simulator.py`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil

from hetjax.costs.costs import Costs
from hetjax.errors import BadInput, did_you_mean
from hetjax.plans.plan import Plan
from hetjax.plans.schedules import FITTED, SCHEDULES, default_launch_ahead
from hetjax.schedule.launch_ahead import (
    RULES,
    exact_delta,
    fitted,
    harp_delta,
    hop_s,
    launch_limits,
    with_launch_ahead,
    with_rule,
)
from hetjax.schedule.programs.action import (
    UNTIED,
    Action,
    Op,
    Programs,
    StageKey,
    Tied,
    format_program,
)
from hetjax.schedule.programs.generate import lane_orders, lanes_of
from hetjax.schedule.programs.list_schedule import Pipeline, list_schedule
from hetjax.schedule.programs.lower import lower_lanes
from hetjax.schedule.simulation.memory import capacity_bytes, memory_uses
from hetjax.schedule.simulation.result import shares_devices
from hetjax.schedule.simulation.simulator import duration_s, simulate

Limits = Mapping[StageKey, int]
Cuts = Mapping[StageKey, int]  # backwards in two halves, by stage
NAMES = (*SCHEDULES, *FITTED)
_MOST_SIMULATIONS, _MOST_ACTIONS = 200, 4_000_000
_LEAST_S = 1e-9  # of a weight gradient
_Score = tuple[float, int, bool, int]


@dataclass(frozen=True, slots=True)
class _Candidate:
    plan: Plan
    lanes: Sequence[Sequence[Action]]
    generated: bool  # the plan's own schedule gives these lanes

    @property
    def num_cut(self) -> Cuts:
        """How many microbatches, the last ones, have their backward in two halves."""
        halves = Counter(a.key for lane in self.lanes for a in lane if a.op is Op.W)
        return {(r, s): halves[r, s] for r, s, _ in self.plan.stages()}

    @property
    def is_cut(self) -> bool:
        return any(self.num_cut.values())

    def score(self, step_s: float) -> _Score:
        """Less is better: of equally fast ones what cuts, changes and keeps least."""
        num_cut, num_kept = sum(self.num_cut.values()), sum(_kept(self.lanes).values())
        return float(f"{step_s:.9g}"), num_cut, not self.generated, num_kept


_Judge = Callable[[_Candidate], _Score]


def may_split(name: str) -> bool:
    """Say whether backwards may be split under the schedule of that name."""
    return name == "searched" or (name in SCHEDULES and SCHEDULES[name].splits)


def with_schedule(
    plan: Plan, name: str, costs: Costs, tied: Tied, *, climbs: bool = True
) -> Plan:
    """Return the plan under the schedule of that name, its own programs left out.

    Besides the schedules of plans: "harp" is h1f1b by HARP's thresholds, "searched" the
    fastest that the search finds, as of `searched`. BadInput for another name.
    """
    limits = launch_limits(plan, costs)
    match name:
        case "h1f1b":
            return fitted(plan, costs, limits, tied)
        case "harp":
            return with_rule(plan, costs, harp_delta, limits)
        case "searched":
            split = launch_limits(plan, costs, split=True)
            return searched(
                plan, costs, limits, split_limits=split, tied=tied, climbs=climbs
            )
    if name not in SCHEDULES:
        raise BadInput(
            got=f"schedule {name!r}",
            allowed=f"one of {', '.join(NAMES)}",
            fix=did_you_mean(name, NAMES),
        )
    aheads = _default_aheads(plan, name)
    return with_launch_ahead(plan, aheads, aheads, name)


def searched(
    plan: Plan,
    costs: Costs,
    limits: Limits,
    *,
    split_limits: Limits | None = None,
    tied: Tied = UNTIED,
    climbs: bool = True,
) -> Plan:
    """Return the plan with the fastest schedule found, as `programs` if need be.

    `limits` bounds the forwards in flight by stage; `split_limits` those of backwards
    in two halves (zero-bubble), which are tried only with it. If nothing fits in
    memory, the result does not either. The effort is bounded: fewer tries for large
    plans, and only the first candidates unless the search `climbs` from the best.
    """

    def judge(candidate: _Candidate) -> _Score:
        programs = lower_lanes(candidate.plan, candidate.lanes, tied)
        if costs.memory and not fits(programs, candidate.plan, costs):
            return candidate.score(float("inf"))
        return candidate.score(simulate(programs, candidate.plan, costs).step_time_s)

    def found(firsts: Iterable[_Candidate], most: Limits) -> tuple[_Score, _Candidate]:
        if not climbs:
            return _least(judge, firsts)
        return _climbed(judge, firsts, costs, most)

    whole = found(_whole(plan, costs, limits), limits)
    if split_limits is None:
        return _written(whole[1], tied)
    halves = found(_halved(plan, costs, split_limits), split_limits)
    return _written(min(whole, halves, key=lambda scored: scored[0])[1], tied)


def _climbed(
    judge: _Judge, firsts: Iterable[_Candidate], costs: Costs, limits: Limits
) -> tuple[_Score, _Candidate]:
    """The best of the first candidates, and then of its neighbours' neighbours."""
    score, best = _least(judge, firsts)
    num_actions = 8 * sum(map(len, best.lanes))
    left = min(_MOST_SIMULATIONS, _MOST_ACTIONS // num_actions)
    while left > 0:
        near = list(_neighbours(best, costs, limits))[:left]
        left -= len(near)
        found_score, found = _least(judge, near) if near else (score, best)
        if found_score >= score:
            break
        score, best = found_score, found
    return score, best


def fits(programs: Programs, plan: Plan, costs: Costs) -> bool:
    """Return whether every device has the memory that the programs need."""
    there = capacity_bytes(plan, costs)
    uses = memory_uses(programs, plan, costs)
    return all(use.total_bytes <= there[device] for device, use in uses.items())


def _least(
    judge: _Judge, candidates: Iterable[_Candidate]
) -> tuple[_Score, _Candidate]:
    judged = (
        (judge(candidate), n, candidate) for n, candidate in enumerate(candidates)
    )
    score, _, candidate = min(judged, key=lambda entry: entry[:2])
    return score, candidate


def _whole(plan: Plan, costs: Costs, limits: Limits) -> Iterator[_Candidate]:
    """First candidates without halves: the named schedules, and greedy lists."""
    if not shares_devices(plan):
        for rule in RULES.values():
            yield _generated(with_rule(plan, costs, rule, limits))
    yield from _named(plan, limits, splits=False)
    yield from _lists(plan, costs, limits, _cut(plan, lambda _: 0))


def _halved(plan: Plan, costs: Costs, limits: Limits) -> Iterator[_Candidate]:
    """First candidates with some backwards, or all, in two halves."""
    yield from _named(plan, limits, splits=True)
    for num_cut in _cuts(plan, costs):
        yield from _lists(plan, costs, limits, num_cut)


def _named(plan: Plan, limits: Limits, *, splits: bool) -> Iterator[_Candidate]:
    """The schedules that no rule of launch-aheads stands for."""
    shares = shares_devices(plan)
    for name, schedule in SCHEDULES.items():
        if (
            name not in RULES
            and schedule.splits == splits
            and (schedule.shares or not shares)
        ):
            yield _generated(_within(plan, limits, name))


def _generated(plan: Plan) -> _Candidate:
    return _Candidate(plan, lane_orders(plan), True)


def _default_aheads(plan: Plan, schedule: str) -> dict[StageKey, int]:
    return {
        (r, s): default_launch_ahead(
            schedule,
            num_stages=len(plan.replicas[r].stages),
            stage=s,
            num_microbatches=plan.replicas[r].num_microbatches,
        )
        for r, s, _ in plan.stages()
    }


def _within(plan: Plan, limits: Limits, schedule: str) -> Plan:
    """The schedule's launch-aheads, as far as memory lets them.

    GPipe asks for none. Zero-bubble lets every stage keep as much as the first, so the
    least limit counts.
    """
    if SCHEDULES[schedule].order == "gpipe":
        return replace(plan, schedule=schedule, programs={})
    if SCHEDULES[schedule].splits:
        least = {r: min(v for k, v in limits.items() if k[0] == r) for r, _ in limits}
        limits = {key: least[key[0]] for key in limits}
    return with_launch_ahead(plan, _default_aheads(plan, schedule), limits, schedule)


def _cuts(plan: Plan, costs: Costs) -> Iterator[Cuts]:
    """How many backwards to cut in two: enough to fill the end, or all.

    What a stage does after its last I has to last as long as the backwards of those
    before it, which need no halves then: the first none, the deeper the more.
    """
    deepest = max(len(replica.stages) for replica in plan.replicas)
    most = max(replica.num_microbatches for replica in plan.replicas)
    for num_cut in (deepest, 2 * deepest, most):
        yield _cut(plan, lambda _, num_cut=num_cut: num_cut)
    for more in range(2):
        yield _cut(plan, lambda key, more=more: _to_fill_the_end(costs, key) + more)


def _to_fill_the_end(costs: Costs, key: StageKey) -> int:
    """Return how many W of a stage last as long as the backwards of those before it."""
    r, s = key
    before_s = sum(costs.times[r, n].backward_s for n in range(s))
    return ceil(before_s / max(duration_s(costs.times[key], Op.W), _LEAST_S))


def _cut(plan: Plan, num_cut: Callable[[StageKey], int]) -> Cuts:
    """So many on each stage, or all that its replica has."""
    return {
        (r, s): min(num_cut((r, s)), plan.replicas[r].num_microbatches)
        for r, s, _ in plan.stages()
    }


def _lists(
    plan: Plan, costs: Costs, limits: Limits, num_cut: Cuts
) -> Iterator[_Candidate]:
    """Greedy lists: with the exact rule's launch-aheads, some more, and all that fit.

    More than the rule's help only backwards cut in two, whose W can wait.
    """
    exact = with_rule(plan, costs, exact_delta, limits)
    aheads = {(r, s): stage.launch_ahead for r, s, stage in exact.stages()}
    for more in range(3 if any(num_cut.values()) else 1):
        raised = {key: ahead + more for key, ahead in aheads.items()}
        ahead = with_launch_ahead(plan, raised, limits)
        yield _listed(ahead, costs, limits, num_cut)
    yield _listed(with_launch_ahead(plan, limits, limits), costs, limits, num_cut)


def _listed(plan: Plan, costs: Costs, limits: Limits, num_cut: Cuts) -> _Candidate:
    """A greedy list with the plan's launch-aheads and the real times."""
    lanes = []
    for r, replica in enumerate(plan.replicas):
        keys = [(r, s) for s in range(len(replica.stages))]
        times = [costs.times[key] for key in keys]
        pipeline = Pipeline(
            forward_s=[t.forward_s for t in times],
            backward_s=[
                *(t.backward_s for t in times[:-1]),
                times[-1].fused_s - times[-1].forward_s,
            ],
            input_gradient_s=[duration_s(t, Op.I) for t in times],
            weight_gradient_s=[duration_s(t, Op.W) for t in times],
            hop_s=[hop_s(costs, (r, s), (r, s + 1)) for _, s in keys],
            lanes=lanes_of(replica),
            num_microbatches=replica.num_microbatches,
            num_cut=[num_cut[key] for key in keys],
        )
        ahead = [stage.launch_ahead for stage in replica.stages]
        kept = [
            limits[key] if any(pipeline.num_cut) else a
            for key, a in zip(keys, ahead, strict=True)
        ]
        for lane in list_schedule(pipeline, ahead, kept):
            lanes.append([Action(op, r, s, m) for s, op, m in lane])
    return _Candidate(plan, lanes, False)


def _neighbours(
    candidate: _Candidate, costs: Costs, limits: Limits
) -> Iterator[_Candidate]:
    """The same kind of schedule with one launch-ahead, or the cuts, changed by one."""
    plan = candidate.plan
    if SCHEDULES[plan.schedule].order == "gpipe":
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
    if candidate.is_cut and not candidate.generated:
        for key, cut in num_cut.items():
            for other in (cut + 1, cut - 1):
                if 0 <= other <= plan.replicas[key[0]].num_microbatches:
                    yield _listed(plan, costs, limits, {**num_cut, key: other})


def _written(candidate: _Candidate, tied: Tied) -> Plan:
    """The plan with its programs as text, unless its schedule generates them."""
    plan = candidate.plan
    if candidate.generated:
        return plan
    shares = shares_devices(plan)
    schedule = "interleaved" if shares else "h1f1b"
    plan = _with_kept(plan, candidate, "zero-bubble" if candidate.is_cut else schedule)
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
