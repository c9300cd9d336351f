# SPDX-License-Identifier: Apache-2.0
"""Local search from a plan on real nodes, judged by simulation.

Owns the moves. Replicas with equal cuts move together, so that segments stay long. The
first move that helps is taken; small moves at the slowest stages come first. Does not
own what makes a plan better (`model/objectives.py`) nor the evaluation of a plan
(`model/evaluator.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, combinations, pairwise
from typing import Any

from hetjax.errors import BadInput
from hetjax.planner.model.deadline import is_over
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.seating import Seat, idle_devices
from hetjax.plans.plan import LayerRange, Plan, Remat, Replica, Stage
from hetjax.schedule.launch_ahead import microbatch_s
from hetjax.schedule.predicted import Predicted
from hetjax.schedule.simulation.result import shares_devices

_SHARES = (0.5, 0.25, 0.75)  # of a stage's layers, where the stage is cut in two
_OF_A_PLAN = 100  # work of evaluating a plan, besides its forwards
_RULED_OUT = 0.1  # of that work, for a plan that is ruled out
_LEAST_GAIN = 1e-4  # relative: a smaller gain is not worth another round
Evaluate = Callable[[Plan], Predicted | None]


def alike(plan: Plan, request: PlanRequest) -> list[list[int]]:
    """Return groups of replicas with equal cuts, meshes and classes of devices."""
    found: dict[tuple[object, ...], list[int]] = {}
    for r, replica in enumerate(plan.replicas):
        cut = tuple(
            (s.layers, s.mesh, s.remat, s.offload, request.class_of[s.node])
            for s in replica.stages
        )
        found.setdefault((replica.microbatch_size, cut), []).append(r)
    return list(found.values())


def more_evenly(
    predicted: Predicted, plan: Plan, groups: Sequence[Sequence[int]]
) -> Iterator[Plan]:
    """Yield plans with sequences moved from replicas that end late to early ones."""
    ends_s = _ends_s(predicted)
    lasts = [max(group, key=ends_s.__getitem__) for group in groups]
    firsts = [min(group, key=ends_s.__getitem__) for group in groups]
    for source in sorted(lasts, key=ends_s.__getitem__, reverse=True):
        for target in sorted(firsts, key=ends_s.__getitem__):
            moved = _one_moved(plan.replicas[source], plan.replicas[target])
            if source != target and moved:
                yield _with(plan, {source: moved[0], target: moved[1]})


def _ends_s(predicted: Predicted) -> list[float]:
    """Return the seconds that each replica's slowest stage computes in a step."""
    plan, costs = predicted.plan, predicted.costs
    return [
        replica.num_microbatches
        * max(microbatch_s(plan, costs, (r, s)) for s in range(len(replica.stages)))
        for r, replica in enumerate(plan.replicas)
    ]


def _one_moved(source: Replica, target: Replica) -> tuple[Replica, Replica] | None:
    """Return both replicas after moving the fewest sequences that their sizes allow."""
    least = max(source.microbatch_size, target.microbatch_size)
    if least % source.microbatch_size or least % target.microbatch_size:
        return None
    fewer, more = least // source.microbatch_size, least // target.microbatch_size
    if source.num_microbatches <= fewer:
        return None
    return (
        replace(source, num_microbatches=source.num_microbatches - fewer),
        replace(target, num_microbatches=target.num_microbatches + more),
    )


def shifted(predicted: Predicted, plan: Plan, group: Sequence[int]) -> Iterator[Plan]:
    """Yield plans with 1 or 2 layers moved over a boundary, off slow stages first."""
    stages = plan.replicas[group[0]].stages
    seconds = [
        microbatch_s(predicted.plan, predicted.costs, (group[0], s))
        for s in range(len(stages))
    ]
    pairs = [(s, s + step) for s in range(len(stages)) for step in (1, -1)]
    inside = [(s, t) for s, t in pairs if 0 <= t < len(stages)]
    for source, target in sorted(inside, key=lambda p: seconds[p[1]] - seconds[p[0]]):
        lo, hi = stages[source].layers
        for num in (1, 2):
            if hi - lo > num:
                move = partial(_moved, source=source, target=target, num=num)
                yield _of_group(plan, group, move)


def _moved(
    stages: Sequence[Stage], source: int, target: int, num: int
) -> tuple[Stage, ...]:
    lower, upper = sorted((source, target))
    cut = stages[lower].layers[1] + (num if source == upper else -num)
    changed = list(stages)
    changed[lower] = replace(stages[lower], layers=(stages[lower].layers[0], cut))
    changed[upper] = replace(stages[upper], layers=(cut, stages[upper].layers[1]))
    return tuple(changed)


def with_other_remat(
    plan: Plan, group: Sequence[int], remats: Sequence[Remat]
) -> Iterator[Plan]:
    for s, stage in enumerate(plan.replicas[group[0]].stages):
        for remat in remats:
            if remat != stage.remat:
                change = partial(_replaced, s=s, end=s + 1, remat=remat)
                yield _of_group(plan, group, change)


def with_other_offload(
    plan: Plan, group: Sequence[int], request: PlanRequest
) -> Iterator[Plan]:
    for s, stage in enumerate(plan.replicas[group[0]].stages):
        for offload in request.offloads:
            if offload != stage.offload:
                change = partial(_replaced, s=s, end=s + 1, offload=offload)
                yield _of_group(plan, group, change)


def _replaced(
    stages: Sequence[Stage], s: int, end: int, kept: int | None = None, **changes: Any
) -> tuple[Stage, ...]:
    """Return the stages with stages s to `end` replaced by one of them, changed."""
    stage = replace(stages[s if kept is None else kept], **changes)
    return (*stages[:s], stage, *stages[end:])


def with_other_size(
    plan: Plan, group: Sequence[int], sizes: Sequence[int]
) -> Iterator[Plan]:
    """Yield plans with other microbatch sizes for all replicas of the group."""
    of_group = [plan.replicas[r] for r in group]
    old = of_group[0].microbatch_size
    data = max(stage.mesh.data for stage in of_group[0].stages)
    for new in sizes:
        sequences = [replica.num_microbatches * old for replica in of_group]
        if new != old and new % data == 0 and not any(n % new for n in sequences):
            yield _with(plan, {r: _resized(plan.replicas[r], new) for r in group})


def _resized(replica: Replica, size: int) -> Replica:
    num_sequences = replica.num_microbatches * replica.microbatch_size
    return replace(
        replica, microbatch_size=size, num_microbatches=num_sequences // size
    )


def swapped(plan: Plan, group: Sequence[int], request: PlanRequest) -> Iterator[Plan]:
    """Yield plans in which two stages on unlike nodes exchange devices, mesh and remat;
    the layer ranges stay."""
    for a, b in _unlike_stages(plan, group, request):
        yield _of_group(plan, group, partial(_exchanged, a=a, b=b))


def reordered(plan: Plan, group: Sequence[int], request: PlanRequest) -> Iterator[Plan]:
    """Yield plans in which two stages on unlike nodes exchange positions, each with its
    number of layers."""
    for a, b in _unlike_stages(plan, group, request):
        yield _of_group(plan, group, partial(_reordered, a=a, b=b))


def _unlike_stages(
    plan: Plan, group: Sequence[int], request: PlanRequest
) -> Iterator[tuple[int, int]]:
    stages = plan.replicas[group[0]].stages
    for a, b in combinations(range(len(stages)), 2):
        if request.class_of[stages[a].node] != request.class_of[stages[b].node]:
            yield a, b


def onto_idle(plan: Plan, group: Sequence[int], request: PlanRequest) -> Iterator[Plan]:
    """Yield plans with a stage cut in two, one part on idle devices of one class: for
    all replicas, or for one."""
    for replicas in (group, group[:1]) if len(group) > 1 else (group,):
        for s, stage in enumerate(plan.replicas[group[0]].stages):
            for seats in _idle_seats(plan, len(stage.devices), request):
                if len(seats) < len(replicas):
                    continue
                given = dict(zip(replicas, seats, strict=False))
                for before in (True, False):
                    for cut in _cuts(stage.layers):
                        yield _with(
                            plan,
                            {
                                r: _cut_up(plan.replicas[r], s, seat, cut, before)
                                for r, seat in given.items()
                            },
                        )


def merged(plan: Plan, group: Sequence[int]) -> Iterator[Plan]:
    """Yield plans with two neighbouring stages merged, on the devices of either."""
    for s, (stage, after) in enumerate(pairwise(plan.replicas[group[0]].stages)):
        layers = stage.layers[0], after.layers[1]
        for kept in (s, s + 1):
            change = partial(_replaced, s=s, end=s + 2, kept=kept, layers=layers)
            yield _of_group(plan, group, change)


def _idle_seats(plan: Plan, num: int, request: PlanRequest) -> list[list[Seat]]:
    """Return seats of `num` idle devices of a node, grouped by class."""
    seats: dict[str, list[Seat]] = {}
    for node, idle in idle_devices(plan, request.cluster).items():
        for first in range(0, len(idle) - num + 1, num):
            seat = node, idle[first : first + num]
            seats.setdefault(request.class_of[node], []).append(seat)
    return list(seats.values())


def _cuts(layers: LayerRange) -> list[int]:
    lo, hi = layers
    cuts = [lo + round((hi - lo) * share) for share in _SHARES]
    return list(dict.fromkeys(cut for cut in cuts if lo < cut < hi))


def _cut_up(replica: Replica, s: int, seat: Seat, cut: int, before: bool) -> Replica:
    """Return the replica with stage s cut in two; `before`: the seat has the first."""
    stage = replica.stages[s]
    own = {"node": seat[0], "devices": seat[1], "precision": None, "attention": None}
    other = replace(stage, **own)
    first, second = (other, stage) if before else (stage, other)
    lo, hi = stage.layers
    halves = replace(first, layers=(lo, cut)), replace(second, layers=(cut, hi))
    stages = (*replica.stages[:s], *halves, *replica.stages[s + 1 :])
    return replace(replica, stages=stages)


def _reordered(stages: Sequence[Stage], a: int, b: int) -> tuple[Stage, ...]:
    """Return the stages with a and b exchanged; all keep their numbers of layers."""
    order = list(stages)
    order[a], order[b] = order[b], order[a]
    ends = accumulate((hi - lo for lo, hi in (s.layers for s in order)), initial=0)
    return tuple(
        replace(stage, layers=layers)
        for stage, layers in zip(order, pairwise(ends), strict=True)
    )


def _exchanged(stages: Sequence[Stage], a: int, b: int) -> tuple[Stage, ...]:
    changed = list(stages)
    changed[a] = replace(stages[b], layers=stages[a].layers)
    changed[b] = replace(stages[a], layers=stages[b].layers)
    return tuple(changed)


def _of_group(
    plan: Plan,
    group: Sequence[int],
    change: Callable[[tuple[Stage, ...]], tuple[Stage, ...]],
) -> Plan:
    """Return the plan with the same change to the stages of all replicas of a group."""
    return _with(
        plan,
        {
            r: replace(plan.replicas[r], stages=change(plan.replicas[r].stages))
            for r in group
        },
    )


def _with(plan: Plan, replicas: dict[int, Replica]) -> Plan:
    return replace(
        plan,
        replicas=tuple(replicas.get(r, old) for r, old in enumerate(plan.replicas)),
    )


def local_search(
    start: Predicted,
    evaluate: Evaluate,
    by: Callable[[Predicted], float],
    request: PlanRequest,
    *,
    most_work: float,
    least: Callable[[Plan], float] | None = None,
) -> Predicted:
    """Return the plan of least value `by` that moves lead to, no worse than the start.

    `least` is a lower bound of `by` that takes little time: plans that it rules out are
    not evaluated.

    The search ends when the time is up (`model/deadline.py`) or after `most_work`: each
    evaluated plan counts its forwards, plus `_OF_A_PLAN`, and a plan that is ruled out
    a tenth of that. 5,000 are about a second of one core.
    """

    best, better, work = start, True, 0
    while better and not is_over():
        better = False
        for plan in _moves(best, request):
            most, found = by(best) * (1 - _LEAST_GAIN), None
            with suppress(BadInput):  # the profile has no times for it
                ruled_out = least is not None and least(plan) >= most
                of_plan = plan.num_forwards + _OF_A_PLAN
                work += of_plan * _RULED_OUT if ruled_out else of_plan
                if is_over() or work > most_work:
                    return best
                found = None if ruled_out else evaluate(plan)
            if found and by(found) < most:
                best, better = found, True
                break
    return best


def unscheduled(plan: Plan) -> Plan:
    """Return the plan before a schedule was found for it."""
    return replace(plan, schedule="1f1b", programs={})


def _moves(predicted: Predicted, request: PlanRequest) -> Iterator[Plan]:
    """Yield the plans one move away, those that relieve the slowest stages first."""
    plan = unscheduled(predicted.plan)
    groups = alike(plan, request)
    yield from more_evenly(predicted, plan, groups)
    for group in groups:
        yield from shifted(predicted, plan, group)
    for group in groups:
        yield from with_other_remat(plan, group, request.remats)
        yield from with_other_offload(plan, group, request)
    if shares_devices(plan):
        return  # the other moves are for plans whose stages have devices of their own
    for group in groups:
        yield from with_other_size(plan, group, request.microbatch_sizes)
        yield from swapped(plan, group, request)
    for group in groups:
        yield from reordered(plan, group, request)
    for group in groups:  # last: with many idle devices, these use up the work
        yield from onto_idle(plan, group, request)
        yield from merged(plan, group)
    for group in groups:
        if len(group) > 1:
            yield from shifted(predicted, plan, group[:1])
