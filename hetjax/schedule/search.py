# SPDX-License-Identifier: Apache-2.0
"""Puts a plan under another schedule: one with a name, or the fastest that is found.

Owns the names, the launch-aheads of each, and the search by simulation under memory
limits. The search first tries the forms of `candidates.py`. From the best of them it
climbs: it changes a stage's launch-ahead or number of split backwards by one as long as
that helps. There are two climbs, one of them without split backwards. So in the
simulator the result is never slower than any named schedule that fits. Does not own
the fit of launch-aheads (`launch_ahead.py`), memory (`simulation/memory.py`) nor the
simulator (`simulation/simulator.py`).
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from typing import Literal

from hetjax.costs.costs import Costs
from hetjax.errors import BadInput, did_you_mean
from hetjax.plans.plan import Plan
from hetjax.plans.schedules import FITTED, SCHEDULES
from hetjax.schedule.candidates import (
    Limits,
    OrderedPlan,
    OrderForm,
    Score,
    default_aheads,
    halved_forms,
    most_in_flight,
    neighbours,
    whole_forms,
)
from hetjax.schedule.launch_ahead import (
    fitted,
    harp_delta,
    launch_limits,
    with_launch_ahead,
    with_rule,
)
from hetjax.schedule.programs.action import (
    UNTIED,
    Programs,
    StageKey,
    Tied,
    format_program,
)
from hetjax.schedule.programs.lower import lower_lanes, timed_lanes
from hetjax.schedule.simulation.memory import capacity_bytes, memory_uses
from hetjax.schedule.simulation.result import shares_devices
from hetjax.schedule.simulation.simulator import simulate

NAMES = (*SCHEDULES, *FITTED)
Forms = Collection[int] | Literal["all", "usual"]
_MOST_SIMULATIONS, _MOST_ACTIONS = 200, 4_000_000


def may_split(name: str) -> bool:
    """Return whether backwards may be split under the schedule of that name."""
    return name == "searched" or (name in SCHEDULES and SCHEDULES[name].splits)


def with_schedule(
    plan: Plan,
    name: str,
    costs: Costs,
    tied: Tied,
    *,
    climbs: bool = True,
    forms: Forms = "all",
) -> Plan:
    """Return the plan under the schedule of that name, without its own programs.

    Two names are not schedules of plans: "harp" is h1f1b by HARP's thresholds, and
    "searched" the fastest schedule that `searched` finds. Raises BadInput for an
    unknown name.
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
                plan,
                costs,
                limits,
                split_limits=split,
                tied=tied,
                climbs=climbs,
                forms=forms,
            )
    if name not in SCHEDULES:
        raise BadInput(
            got=f"schedule {name!r}",
            allowed=f"one of {', '.join(NAMES)}",
            fix=did_you_mean(name, NAMES),
        )
    aheads = default_aheads(plan, name)
    return with_launch_ahead(plan, aheads, aheads, name)


def searched(
    plan: Plan,
    costs: Costs,
    limits: Limits,
    *,
    split_limits: Limits | None = None,
    tied: Tied = UNTIED,
    climbs: bool = True,
    forms: Forms = "all",
) -> Plan:
    """Return the plan with the fastest schedule found, as `programs` if needed.

    `limits` bounds the forwards in flight by stage; `split_limits` those with split
    backwards (zero-bubble), which are only tried if it is given. If nothing fits in
    memory, the result does not fit, either. The effort is bounded: large plans get
    fewer tries; without `climbs`, the search only tries the first candidates; and
    `forms` limits these to the usual ones, or to the numbers of `fastest_forms`.
    """
    judge = _Judge(costs, tied)
    found: list[tuple[Score, OrderedPlan]] = []
    first = 0
    for made, most in _kinds(plan, costs, limits, split_limits):
        chosen = [f for n, f in enumerate(made, first) if _among(forms, n, f)]
        first += len(made)
        if chosen:
            found.append(judge.climbed(chosen, most) if climbs else judge.best(chosen))
    return _written(min(found, key=lambda scored: scored[0])[1], tied)


def _among(forms: Forms, n: int, form: OrderForm) -> bool:
    return forms == "all" or (form.usual if forms == "usual" else n in forms)


def fastest_forms(plan: Plan, costs: Costs, tied: Tied, most: int) -> tuple[int, ...]:
    """Return the numbers of the `most` fastest forms for the plan, fastest first.

    They are good forms for similar plans, too.
    """
    split = launch_limits(plan, costs, split=True)
    kinds = _kinds(plan, costs, launch_limits(plan, costs), split)
    forms = chain.from_iterable(made for made, _ in kinds)
    return tuple(n for _, n, _ in islice(_Judge(costs, tied).ranked(forms), most))


def _kinds(
    plan: Plan, costs: Costs, limits: Limits, split_limits: Limits | None
) -> Iterator[tuple[list[OrderForm], Limits]]:
    """Yield the forms without and those with split backwards, with their limits."""
    yield list(whole_forms(plan, costs, limits)), limits
    if split_limits is not None:
        yield list(halved_forms(plan, costs, split_limits)), split_limits


_Scored = tuple[Score, int, OrderedPlan]  # a form's score, its number, its candidate


@dataclass(frozen=True, slots=True)
class _Judge:
    """Simulates and ranks candidates; those that exceed memory take infinitely long."""

    costs: Costs
    tied: Tied

    def climbed(
        self, firsts: Iterable[OrderForm], limits: Limits
    ) -> tuple[Score, OrderedPlan]:
        """Return the best candidate of a climb that starts at the best of `firsts`."""
        score, best = self.best(firsts)
        num_actions = 8 * sum(map(len, best.lanes))
        left = min(_MOST_SIMULATIONS, _MOST_ACTIONS // num_actions)
        while left > 0:
            near = list(neighbours(best, self.costs, limits))[:left]
            left -= len(near)
            found = next(self.ranked(near, score), None)
            if found is None or found[0] >= score:
                break
            score, _, best = found
        return score, best

    def best(self, forms: Iterable[OrderForm]) -> tuple[Score, OrderedPlan]:
        """Return the first candidate of least score."""
        score, _, found = next(self.ranked(forms))
        return score, found

    def ranked(
        self, forms: Iterable[OrderForm], below: Score | None = None
    ) -> Iterator[_Scored]:
        """Yield distinct candidates by score, then number; if `below` is given, those
        of a lower score, and maybe others that exceed memory.

        All are simulated first. Memory, which takes longer, is checked one by one.
        """
        simulated = [(self._score(found), n, found) for n, found in _unlike(forms)]
        simulated.sort(key=lambda scored: scored[:2])
        exceeding: list[_Scored] = []
        for score, n, candidate in simulated:
            if below is not None and score >= below:
                break
            if self._fits(candidate):
                yield score, n, candidate
            else:
                exceeding.append((candidate.score(float("inf")), n, candidate))
        yield from sorted(exceeding, key=lambda scored: scored[:2])

    def _score(self, candidate: OrderedPlan) -> Score:
        """Return the score, whatever the memory."""
        plan, lanes = candidate.plan, candidate.lanes
        make = lower_lanes if shares_devices(plan) else timed_lanes
        simulated = simulate(make(plan, lanes, self.tied), plan, self.costs)
        return candidate.score(simulated.step_time_s)

    def _fits(self, candidate: OrderedPlan) -> bool:
        if not self.costs.memory:
            return True
        programs = lower_lanes(candidate.plan, candidate.lanes, self.tied)
        return fits(programs, candidate.plan, self.costs)


def _unlike(forms: Iterable[OrderForm]) -> Iterator[tuple[int, OrderedPlan]]:
    """Yield numbers and candidates without repeated orders: a quarter repeat."""
    seen = set[object]()
    for n, form in enumerate(forms):
        candidate = form.make()
        order = tuple(map(tuple, candidate.lanes))
        if order not in seen:
            seen.add(order)
            yield n, candidate


def fits(programs: Programs, plan: Plan, costs: Costs) -> bool:
    """Return whether every device has the memory that the programs need."""
    there = capacity_bytes(plan, costs)
    uses = memory_uses(programs, plan, costs)
    return all(use.total_bytes <= there[device] for device, use in uses.items())


def _written(candidate: OrderedPlan, tied: Tied) -> Plan:
    """Return the plan with its programs as text, unless its schedule generates them."""
    plan = candidate.plan
    if candidate.generated:
        return plan
    shares = shares_devices(plan)
    schedule = "interleaved" if shares else "h1f1b"
    plan = _with_kept(plan, candidate, "zero-bubble" if candidate.is_cut else schedule)
    programs = lower_lanes(plan, candidate.lanes, tied)
    texts = {node: format_program(program) for node, program in programs.items()}
    return replace(plan, programs=texts)


def _with_kept(plan: Plan, candidate: OrderedPlan, schedule: str) -> Plan:
    """Return the plan with the least non-rising launch-aheads of its programs."""
    kept = most_in_flight(candidate.lanes)
    most: dict[StageKey, int] = {}
    for r, replica in enumerate(plan.replicas):
        from_last = [kept[r, s] for s in reversed(range(len(replica.stages)))]
        for s, ahead in enumerate(reversed(list(accumulate(from_last, max)))):
            most[r, s] = ahead
    return with_launch_ahead(plan, most, most, schedule)
