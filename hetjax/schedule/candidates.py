# SPDX-License-Identifier: Apache-2.0
"""Enumerates candidate orders of a plan's actions: the first ones, and neighbours.

Owns the forms that the search tries first (all named schedules that the devices allow,
launch-aheads for memory caps, and greedy lists with the real times,
`programs/list_schedule.py`) and the neighbours of a candidate. Equal numbers mean the
same form for all plans with equally many stages. Does not own the scoring (`search.py`)
nor the choice of launch-aheads (`launch_ahead.py`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

from hetjax.costs.costs import Costs
from hetjax.plans.plan import Plan
from hetjax.plans.schedules import SCHEDULES, default_launch_ahead
from hetjax.schedule.launch_ahead import (
    RULES,
    SLACKS,
    Rule,
    exact_delta,
    hop_s,
    spread,
    with_launch_ahead,
    with_rule,
)
from hetjax.schedule.programs.action import Action, Op, StageKey
from hetjax.schedule.programs.generate import lane_orders, lanes_of
from hetjax.schedule.programs.list_schedule import Pipeline, list_schedule
from hetjax.schedule.simulation.result import shares_devices
from hetjax.schedule.simulation.simulator import duration_s

Limits = Mapping[StageKey, int]
Cuts = Mapping[StageKey, int]  # number of split backwards, by stage
_LEAST_S = 1e-9  # of a weight gradient
Score = tuple[float, int, bool, int]


@dataclass(frozen=True, slots=True)
class OrderedPlan:
    """A plan with an order for every lane; `generated` if its schedule makes them."""

    plan: Plan
    lanes: Sequence[Sequence[Action]]
    generated: bool

    @property
    def num_cut(self) -> Cuts:
        """The number of microbatches, the last ones, whose backward is split."""
        halves = Counter(a.key for lane in self.lanes for a in lane if a.op is Op.W)
        return {(r, s): halves[r, s] for r, s, _ in self.plan.stages()}

    @property
    def is_cut(self) -> bool:
        return any(self.num_cut.values())

    def score(self, step_s: float) -> Score:
        """Return the score; less is better.

        Of equally fast candidates, those with fewer split backwards win, then generated
        ones, then those with fewer forwards in flight.
        """
        num_cut = sum(self.num_cut.values())
        num_kept = sum(most_in_flight(self.lanes).values())
        return float(f"{step_s:.9g}"), num_cut, not self.generated, num_kept


@dataclass(frozen=True, slots=True)
class OrderForm:
    """An order that is made on demand. The few `usual` forms are the fastest for most
    plans (measured on about 300 plans for five random clusters)."""

    make: Callable[[], OrderedPlan]
    usual: bool = False


def whole_forms(plan: Plan, costs: Costs, limits: Limits) -> Iterator[OrderForm]:
    """Yield forms without split backwards: named schedules, greedy lists, and both
    with the launch-aheads of `spread`. The last are there even if memory caps no stage,
    so that the forms' numbers do not depend on memory."""
    shares = shares_devices(plan)
    rules = () if shares else RULES.values()
    for n, rule in enumerate(rules):
        yield OrderForm(partial(_ruled, plan, costs, rule, limits), usual=n < 2)
    whole = _cut(plan, lambda _: 0)
    named = _named(plan, limits, splits=False)
    lists = _lists(plan, costs, limits, whole)
    for n, form in enumerate((*named, *lists)):
        yield replace(form, usual=shares and n < 2)
    for slack in () if shares else SLACKS:
        yield OrderForm(partial(_spread, plan, costs, limits, slack))
        yield OrderForm(partial(_spread_list, plan, costs, limits, slack, whole))


def halved_forms(plan: Plan, costs: Costs, limits: Limits) -> Iterator[OrderForm]:
    """Yield forms in which some or all backwards are split."""
    yield from _named(plan, limits, splits=True)
    for num_cut in _cuts(plan, costs):
        first, *others = _lists(plan, costs, limits, num_cut)
        yield from (replace(first, usual=True), *others)


def _ruled(plan: Plan, costs: Costs, rule: Rule, limits: Limits) -> OrderedPlan:
    return _generated(with_rule(plan, costs, rule, limits))


def _spread(plan: Plan, costs: Costs, limits: Limits, slack: float) -> OrderedPlan:
    return _generated(spread(plan, costs, limits, slack=slack))


def _spread_list(
    plan: Plan, costs: Costs, limits: Limits, slack: float, num_cut: Cuts
) -> OrderedPlan:
    return _listed(spread(plan, costs, limits, slack=slack), costs, limits, num_cut)


def _named(plan: Plan, limits: Limits, *, splits: bool) -> Iterator[OrderForm]:
    """Yield the schedules that no rule of launch-aheads covers."""
    shares = shares_devices(plan)
    for name, schedule in SCHEDULES.items():
        if (
            name not in RULES
            and schedule.splits == splits
            and (schedule.shares or not shares)
        ):
            yield OrderForm(partial(_as_named, plan, limits, name))


def _as_named(plan: Plan, limits: Limits, schedule: str) -> OrderedPlan:
    return _generated(_within(plan, limits, schedule))


def _generated(plan: Plan) -> OrderedPlan:
    return OrderedPlan(plan, lane_orders(plan), True)


def default_aheads(plan: Plan, schedule: str) -> dict[StageKey, int]:
    """Return the default launch-aheads of a schedule."""
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
    """Return the plan with the schedule's launch-aheads, capped by memory.

    GPipe needs none. Under zero-bubble, every stage may keep as many forwards as the
    first stage, so the least limit counts.
    """
    if SCHEDULES[schedule].order == "gpipe":
        return replace(plan, schedule=schedule, programs={})
    if SCHEDULES[schedule].splits:
        least = {r: min(v for k, v in limits.items() if k[0] == r) for r, _ in limits}
        limits = {key: least[key[0]] for key in limits}
    return with_launch_ahead(plan, default_aheads(plan, schedule), limits, schedule)


def _cuts(plan: Plan, costs: Costs) -> Iterator[Cuts]:
    """Yield numbers of backwards to split: all, a few, or enough to fill the end.

    After its last I, a stage should work as long as the backwards of the stages before
    it take. So the first stage needs no split backwards, and deeper stages need more.
    """
    deepest = max(len(replica.stages) for replica in plan.replicas)
    most = max(replica.num_microbatches for replica in plan.replicas)
    for num_cut in (deepest, 2 * deepest, most):
        yield _cut(plan, lambda _, num_cut=num_cut: num_cut)
    for more in range(2):
        yield _cut(plan, lambda key, more=more: _to_fill_the_end(costs, key) + more)


def _to_fill_the_end(costs: Costs, key: StageKey) -> int:
    """Return how many W of a stage last as long as earlier stages' backwards."""
    r, s = key
    before_s = sum(costs.times[r, n].backward_s for n in range(s))
    return ceil(before_s / max(duration_s(costs.times[key], Op.W), _LEAST_S))


def _cut(plan: Plan, num_cut: Callable[[StageKey], int]) -> Cuts:
    """Return `num_cut` of each stage, capped at its replica's microbatches."""
    return {
        (r, s): min(num_cut((r, s)), plan.replicas[r].num_microbatches)
        for r, s, _ in plan.stages()
    }


def _lists(
    plan: Plan, costs: Costs, limits: Limits, num_cut: Cuts
) -> Iterator[OrderForm]:
    """Yield greedy lists: with the exact rule's launch-aheads, some more, or the most.

    Launch-aheads above the rule's only help with split backwards, whose W can wait.
    """
    exact = with_rule(plan, costs, exact_delta, limits)
    aheads = {(r, s): stage.launch_ahead for r, s, stage in exact.stages()}
    for more in range(3 if any(num_cut.values()) else 1):
        raised = {key: ahead + more for key, ahead in aheads.items()}
        ahead = with_launch_ahead(plan, raised, limits)
        yield OrderForm(partial(_listed, ahead, costs, limits, num_cut))
    ahead = with_launch_ahead(plan, limits, limits)
    yield OrderForm(partial(_listed, ahead, costs, limits, num_cut))


def _listed(plan: Plan, costs: Costs, limits: Limits, num_cut: Cuts) -> OrderedPlan:
    """Return a greedy list with the plan's launch-aheads and the real times."""
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
    return OrderedPlan(plan, lanes, False)


def neighbours(
    candidate: OrderedPlan, costs: Costs, limits: Limits
) -> Iterator[OrderForm]:
    """Yield the same kind of schedule with one launch-ahead, or one stage's number of
    split backwards, changed by one."""
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
                yield OrderForm(partial(_generated, near))
            else:
                yield OrderForm(partial(_listed, near, costs, limits, num_cut))
    if candidate.is_cut and not candidate.generated:
        for key, cut in num_cut.items():
            for other in (cut + 1, cut - 1):
                if 0 <= other <= plan.replicas[key[0]].num_microbatches:
                    changed = {**num_cut, key: other}
                    yield OrderForm(partial(_listed, plan, costs, limits, changed))


def most_in_flight(lanes: Sequence[Sequence[Action]]) -> dict[StageKey, int]:
    """Return the most forwards in flight of every stage."""
    most: dict[StageKey, int] = {}
    now: dict[StageKey, int] = {}
    for lane in lanes:
        for action in lane:
            change = {Op.F: 1, Op.B: -1, Op.W: -1}.get(action.op, 0)
            now[action.key] = now.get(action.key, 0) + change
            most[action.key] = max(most.get(action.key, 1), now[action.key])
    return most
