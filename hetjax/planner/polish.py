# SPDX-License-Identifier: Apache-2.0
"""Local search from a plan on real nodes, judged by the simulator.

Owns the moves: a layer over a stage boundary, microbatches from one replica to another,
another remat, microbatches half or twice as large, two stages of unlike devices in each
other's place. Replicas that are cut alike move together first, so that segments stay
long. The first move that helps is taken. Does not own what is better (`objectives.py`)
nor what a plan takes (`judge.py`).
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

from hetjax.plans.plan import Plan, Remat, Replica, Stage
from hetjax.schedule.launch_ahead import microbatch_s
from hetjax.schedule.predicted import Predicted

_LEAST_GAIN = 1e-4  # relative: less is not worth another round

Judge = Callable[[Plan], Predicted | None]
Score = Callable[[Predicted], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """What moves may choose from, and the class of every node."""

    remats: Sequence[Remat]
    microbatch_sizes: Sequence[int]
    class_of: Mapping[str, str]


def polished(
    start: Predicted, judge: Judge, score: Score, choices: Choices, until_s: float
) -> Predicted:
    """Return the best plan that moves lead to, no worse than the start.

    `until_s` is when to stop, by `time.monotonic`.
    """
    best, best_score = start, score(start)
    better = True
    while better and time.monotonic() < until_s:
        better = False
        for plan in _moves(best, choices):
            if time.monotonic() >= until_s:
                break
            found = judge(plan)
            if found and score(found) < best_score * (1 - _LEAST_GAIN):
                best, best_score, better = found, score(found), True
                break
    return best


def _moves(predicted: Predicted, choices: Choices) -> Iterator[Plan]:
    """Plans a move away, those first that take from what is slowest."""
    plan = replace(predicted.plan, schedule="1f1b", programs={})
    groups = _alike(plan)
    yield from _more_evenly(predicted, plan, groups)
    for group in groups:
        yield from _shifted(predicted, plan, group)
    for group in groups:
        yield from _with_other_remat(plan, group, choices.remats)
        yield from _with_other_size(plan, group, choices.microbatch_sizes)
        yield from _swapped(plan, group, choices.class_of)
    for group in groups:
        if len(group) > 1:
            yield from _shifted(predicted, plan, group[:1])


def _alike(plan: Plan) -> list[list[int]]:
    """Replicas by how they are cut and meshed."""
    found: dict[tuple[object, ...], list[int]] = {}
    for r, replica in enumerate(plan.replicas):
        cut = tuple((s.layers, s.mesh, s.remat) for s in replica.stages)
        found.setdefault((replica.microbatch_size, cut), []).append(r)
    return list(found.values())


def _more_evenly(
    predicted: Predicted, plan: Plan, groups: Sequence[Sequence[int]]
) -> Iterator[Plan]:
    """One microbatch less for the replica that ends last, one more for another."""
    ends_s = _ends_s(predicted)
    lasts = [max(group, key=ends_s.__getitem__) for group in groups]
    firsts = [min(group, key=ends_s.__getitem__) for group in groups]
    for source in sorted(lasts, key=ends_s.__getitem__, reverse=True):
        for target in sorted(firsts, key=ends_s.__getitem__):
            moved = _one_moved(plan.replicas[source], plan.replicas[target])
            if source != target and moved:
                yield _with(plan, {source: moved[0], target: moved[1]})


def _ends_s(predicted: Predicted) -> list[float]:
    """What the slowest stage of each replica computes in a step."""
    plan, costs = predicted.plan, predicted.costs
    return [
        replica.num_microbatches
        * max(microbatch_s(plan, costs, (r, s)) for s in range(len(replica.stages)))
        for r, replica in enumerate(plan.replicas)
    ]


def _one_moved(source: Replica, target: Replica) -> tuple[Replica, Replica] | None:
    """As few sequences moved as both microbatch sizes allow."""
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


def _shifted(predicted: Predicted, plan: Plan, group: Sequence[int]) -> Iterator[Plan]:
    """A layer over a boundary, away from slow stages first."""
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
    (lo, hi), (first, last) = stages[source].layers, stages[target].layers
    changed = list(stages)
    if target > source:
        changed[source] = replace(stages[source], layers=(lo, hi - num))
        changed[target] = replace(stages[target], layers=(first - num, last))
    else:
        changed[source] = replace(stages[source], layers=(lo + num, hi))
        changed[target] = replace(stages[target], layers=(first, last + num))
    return tuple(changed)


def _with_other_remat(
    plan: Plan, group: Sequence[int], remats: Sequence[Remat]
) -> Iterator[Plan]:
    for s, stage in enumerate(plan.replicas[group[0]].stages):
        for remat in remats:
            if remat != stage.remat:
                yield _of_group(plan, group, partial(_kept, s=s, remat=remat))


def _kept(stages: Sequence[Stage], s: int, remat: Remat) -> tuple[Stage, ...]:
    return (*stages[:s], replace(stages[s], remat=remat), *stages[s + 1 :])


def _with_other_size(
    plan: Plan, group: Sequence[int], sizes: Sequence[int]
) -> Iterator[Plan]:
    """Larger or smaller microbatches, for all replicas of the group."""
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


def _swapped(
    plan: Plan, group: Sequence[int], class_of: Mapping[str, str]
) -> Iterator[Plan]:
    """Two stages of unlike nodes in each other's place: devices go, layers stay."""
    stages = plan.replicas[group[0]].stages
    for a, b in combinations(range(len(stages)), 2):
        if class_of[stages[a].node] != class_of[stages[b].node]:
            yield _of_group(plan, group, partial(_exchanged, a=a, b=b))


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
    """The plan with the stages of some replicas changed alike."""
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
