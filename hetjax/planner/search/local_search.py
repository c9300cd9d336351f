# SPDX-License-Identifier: Apache-2.0
"""Local search from a plan on real nodes, by what the simulator says.

Owns that the first move that helps is taken, and their order: small ones on what is
slowest come first. Does not own the moves (`moves.py`), what is better
(`model/objectives.py`) nor what a plan takes (`model/evaluator.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetjax.planner.model.deadline import is_over
from hetjax.planner.search.moves import (
    alike,
    merged,
    more_evenly,
    onto_idle,
    shifted,
    swapped,
    with_other_remat,
    with_other_size,
)
from hetjax.plans.plan import Plan, Remat
from hetjax.schedule.predicted import Predicted

_LEAST_GAIN = 1e-4  # relative: less is not worth another round

Evaluate = Callable[[Plan], Predicted | None]
Score = Callable[[Predicted], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """What moves may choose from, and what every node is and has."""

    remats: Sequence[Remat]
    microbatch_sizes: Sequence[int]
    class_of: Mapping[str, str]
    counts: Mapping[str, int]


def local_search(
    start: Predicted, evaluate: Evaluate, score: Score, choices: Choices
) -> Predicted:
    """Return the best plan that moves lead to, no worse than the start.

    As far as the time goes (`model/deadline.py`).
    """
    best, best_score = start, score(start)
    better = True
    while better and not is_over():
        better = False
        for plan in _moves(best, choices):
            if is_over():
                break
            found = evaluate(plan)
            if found and score(found) < best_score * (1 - _LEAST_GAIN):
                best, best_score, better = found, score(found), True
                break
    return best


def _moves(predicted: Predicted, choices: Choices) -> Iterator[Plan]:
    """Plans a move away, those first that take from what is slowest."""
    plan = replace(predicted.plan, schedule="1f1b", programs={})
    groups = alike(plan, choices.class_of)
    yield from more_evenly(predicted, plan, groups)
    for group in groups:
        yield from shifted(predicted, plan, group)
    for group in groups:
        yield from with_other_remat(plan, group, choices.remats)
        yield from with_other_size(plan, group, choices.microbatch_sizes)
        yield from swapped(plan, group, choices.class_of)
    for group in groups:
        yield from onto_idle(plan, group, choices.counts, choices.class_of)
        yield from merged(plan, group)
    for group in groups:
        if len(group) > 1:
            yield from shifted(predicted, plan, group[:1])
