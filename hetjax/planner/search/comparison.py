# SPDX-License-Identifier: Apache-2.0
"""Collects the results of one planning command: the plan, and its comparisons.

Owns which searches a command makes and which results it keeps: of other planners, for
other wishes, with a node more or fewer. Does not own the searches (`find.py` and
others), options (`cli/`) nor the display of results (`report/`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import get_args

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Cluster, part_of
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.baselines.by_name import BASELINES, compared
from hetjax.planner.model.costing import memory_from, times_from
from hetjax.planner.model.deadline import (
    TimeUp,
    check_deadline,
    deadline,
    is_over,
    left_s,
)
from hetjax.planner.model.evaluator import as_planned, how_sure
from hetjax.planner.model.objectives import Objective, Wish, score, within
from hetjax.planner.model.request import NodeClass, PlanRequest, check_request
from hetjax.planner.search.find import LOCAL_WORK, Found, Search
from hetjax.planner.search.idle import Idle, try_idle, why_idle
from hetjax.planner.search.incumbents import Incumbent, TellProgress
from hetjax.planner.search.replan import Replanned, replan
from hetjax.planner.search.worth import Worth, worth_of_parts
from hetjax.plans.plan import Plan
from hetjax.schedule.certainty import Certainty
from hetjax.schedule.predicted import Predicted

_LITTLE_WORK = 4_000  # forwards of a step; such a plan simulates quickly
MOST_COMPARED = 64  # devices up to which baselines are compared by default

Evaluated = Mapping[str, Predicted | NoFeasiblePlan]


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """A cluster, as it is or as it might be, and the best step on it (None if none)."""

    name: str
    step_time_s: float | None
    tokens_per_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """What a command asks for besides the best plan.

    `baselines` are names; None means all of them if the cluster is small.
    """

    baselines: tuple[str, ...] | None = None
    pareto: bool = False
    what_if: bool = False
    current: Plan | None = None
    horizon_s: float = 3600.0


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The best plan and the answers; answers to questions not asked are empty or None.

    `alone` is the result before plans of other planners were known; with them the
    search may find a better plan, or a plan at all. `moved` is the move from the
    current plan, if there is one. `bfloat16_step_s` is the plan's step if workers send
    gradients in bfloat16; None if they already do or send none, or if the plan does not
    simulate quickly. `left_out` names the planners and clusters for which there was no
    time. `cut_short` is whether the time was up before the search ended.
    """

    request: PlanRequest
    objective: Objective
    found: Found
    alone: Found | NoFeasiblePlan
    moved: Replanned | None = None
    idle: tuple[Idle, ...] = ()
    parts: tuple[Worth, ...] = ()
    second: Predicted | None = None
    baselines: Evaluated | None = None
    pareto: tuple[Found, ...] = ()
    what_if: tuple[WhatIf, ...] = ()
    bfloat16_step_s: float | None = None
    left_out: tuple[str, ...] = ()
    cut_short: bool = False

    @property
    def best(self) -> Predicted:
        return self.found.best

    @cached_property
    def certainty(self) -> Certainty:
        """The certainty of the best plan's prediction."""
        return how_sure(self.request, self.best)

    @cached_property
    def certainties(self) -> Mapping[str, Certainty]:
        """The certainty of other planners' plans, for those that simulate quickly."""
        return {
            name: how_sure(self.request, judged)
            for name, judged in (self.baselines or {}).items()
            if isinstance(judged, Predicted)
            and judged.plan.num_forwards <= _LITTLE_WORK
        }


def planned(
    request: PlanRequest,
    objective: Objective,
    questions: Questions,
    *,
    profile_path: Path | None,
    progress: TellProgress,
    local_work: float = LOCAL_WORK,
) -> Planned:
    """Answer the questions, as far as time allows (`model/deadline.py`).

    Raises NoFeasiblePlan if nothing fits, TimeUp if nothing is found in time.
    """
    check_request(request)
    names = _baselines(request, questions)
    clusters = list(_clusters(request)) if questions.what_if else []
    wished = every_wish(objective) if questions.pareto else (objective,)
    search = Search(request, wished, progress, local_work)
    with deadline(left_s() / (1 + bool(names) + questions.what_if)):
        alone = _alone(search, objective)
    with deadline(left_s() / (bool(names) + questions.what_if or 1)):
        others = _compared(request, names, progress)
        better = {n: p.plan for n, p in others.items() if isinstance(p, Predicted)}
        search.start_from(better)
        if isinstance(alone, NoFeasiblePlan):
            if not search.incumbents.best:
                raise alone
            search.prove()
    cut_short = try_idle(search, objective)
    search.finish()
    search.prove_wider()
    found = unmoved = search.found_by(objective)
    moved = None
    if questions.current is not None:
        current, ours = questions.current, {found.source: found.best.plan}
        moved = replan(request, current, questions.horizon_s, objective, others=ours)
        moved_to = Incumbent(predicted=moved.best, source=moved.source)
        found = search.found_by(objective, moved_to)
    cases = tuple(_what_if(request, clusters, progress))
    answered = {*others, *(case.name for case in cases)}
    asked = (*names, *(name for name, _ in clusters))
    simulated = search.incumbents.under_all_schedules()
    found = _with_times_from(found, profile_path)
    return Planned(
        request=request,
        objective=objective,
        found=found,
        alone=alone,
        moved=moved,
        idle=why_idle(found, search.incumbents.simulated(), cut_short),
        parts=worth_of_parts(
            unmoved, search.incumbents.simulated(), search.first.searched
        ),
        second=_second(found, simulated),
        baselines=others if names else None,
        pareto=search.found() if questions.pareto else (),
        what_if=cases,
        bfloat16_step_s=_bfloat16_step_s(found),
        left_out=tuple(name for name in asked if name not in answered),
        cut_short=is_over(),
    )


def _bfloat16_step_s(found: Found) -> float | None:
    """Return the step with gradients sent in bfloat16; None if that changes nothing, or
    if the plan does not simulate quickly."""
    request, best = found.request, found.best
    halved = replace(request, gradient_wire="bfloat16")
    if request.gradient_wire == "bfloat16" or best.plan.num_forwards > _LITTLE_WORK:
        return None
    predicted = as_planned(halved, best.plan)
    if predicted.costs.reductions == best.costs.reductions:
        return None
    return predicted.simulation.step_time_s


def _second(found: Found, simulated: Iterable[Predicted]) -> Predicted | None:
    """Return the best plan by the objective with other cuts or kinds of devices."""
    cluster, objective = found.request.cluster, found.objective
    taken = _layout(found.best.plan, cluster)
    others = (
        other
        for other in simulated
        if within(other, objective) and _layout(other.plan, cluster) != taken
    )
    by = partial(score, cluster=cluster, objective=objective)
    return min(others, key=by, default=None)


def _layout(plan: Plan, cluster: Cluster) -> Counter[tuple[object, ...]]:
    """Return the cuts of replicas, without their places among equal nodes."""
    kinds = {node.name: canonical_name(node.device) for node in cluster.nodes}
    return Counter(
        tuple((kinds[x.node], x.mesh, x.layers) for x in replica.stages)
        for replica in plan.replicas
    )


def _alone(search: Search, objective: Objective) -> Found | NoFeasiblePlan:
    """Return what the search finds without plans of other planners."""
    try:
        search.run()
    except NoFeasiblePlan as error:
        return error
    return search.found_by(objective)


def _compared(
    request: PlanRequest, names: Sequence[str], progress: TellProgress
) -> Evaluated:
    """Return the results of as many other planners as there is time for."""
    others: dict[str, Predicted | NoFeasiblePlan] = {}
    for n, name in enumerate(names):
        progress(f"planning as {', '.join(names[n:])} would")
        with deadline(left_s() / (len(names) - n)), suppress(TimeUp):
            others |= compared(request, [name])
    return others


def _with_times_from(found: Found, profile_path: Path | None) -> Found:
    request, best = found.request, found.best
    times = times_from(
        best.plan,
        request.cluster,
        request.dtype,
        request.profile,
        profile_path,
        best.tied,
        request.calibration,
    )
    times = memory_from(times, best.costs)
    return replace(found, best=replace(best, times_from=times))


def _baselines(request: PlanRequest, questions: Questions) -> Sequence[str]:
    if questions.baselines is not None:
        return questions.baselines
    return tuple(BASELINES) if request.cluster.num_devices <= MOST_COMPARED else ()


def every_wish(objective: Objective) -> tuple[Objective, ...]:
    """Return an objective for every wish, within the same limits."""
    return tuple(replace(objective, wish=wish) for wish in get_args(Wish))


def _what_if(
    request: PlanRequest,
    clusters: Sequence[tuple[str, Cluster]],
    progress: TellProgress,
) -> Iterator[WhatIf]:
    """Yield the best step on each cluster, found without local search: compare it only
    with the first. When the time is up (`model/deadline.py`), clusters are left out."""
    for n, (name, cluster) in enumerate(clusters):

        def report_line(line: str, name: str = name) -> None:
            progress(f"{name}: {line}")

        try:
            with deadline(left_s() / (len(clusters) - n)):
                check_deadline()
                search = Search(
                    replace(request, cluster=cluster), [Objective()], report_line
                )
                search.propose()
                best = search.found()[0].best
                step_s, tokens_per_s = best.simulation.step_time_s, best.tokens_per_s
        except NoFeasiblePlan:
            step_s, tokens_per_s = None, None
        except TimeUp:
            return
        yield WhatIf(name=name, step_time_s=step_s, tokens_per_s=tokens_per_s)


def _clusters(request: PlanRequest) -> Iterator[tuple[str, Cluster]]:
    yield "as it is", request.cluster
    for nodes in request.classes:
        yield f"one more {nodes.name} node", _one_more(request.cluster, nodes)
    for nodes in request.classes:
        gone = nodes.nodes[-1].name
        left = [n.name for n in request.cluster.nodes if n.name != gone]
        if left:
            yield f"one {nodes.name} node fewer", part_of(request.cluster, left)


def _one_more(cluster: Cluster, nodes: NodeClass) -> Cluster:
    """Return the cluster plus a node with the links of the last node of its class."""
    twin = nodes.nodes[-1]
    node = replace(twin, name=f"{twin.name}-more")
    names = {twin.name: node.name}
    links = [
        replace(link, between=(names.get(a, a), names.get(b, b)))
        for link in cluster.links
        for a, b in [link.between]
        if twin.name in (a, b)
    ]
    return replace(
        cluster, nodes=(*cluster.nodes, node), links=(*cluster.links, *links)
    )
