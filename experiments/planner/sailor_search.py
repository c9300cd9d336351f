# SPDX-License-Identifier: Apache-2.0
"""Searches for the best plan by Sailor's rule.

By that rule (`sailor_rule.py`) a plan takes its slowest pipeline plus its longest sum.
So, for several limits on a device's weights, the planner finds the fastest pipelines,
ignoring sums. The rule then judges these plans, and changes of one copy, cut, tensor
degree or microbatch size improve the best. No bound is known for the rule, and none is
reported.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.planner.published_terms import (
    FLOAT_BYTES,
    Published,
    parameters_L,
    published_problem,
)
from experiments.planner.sailor_rule import Counts, SailorRule, without_sums
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.model.problem import Problem
from hetjax.planner.model.templates import Column, Template, TemplateStage, exists
from hetjax.planner.search.integer_master import ColumnCount
from hetjax.planner.search.price_and_branch import candidates

_LEAST_SHARE = 1 / 40  # of all weights, on one device
_NEXT_LIMIT = 0.82  # of the previous limit
_NUM_STARTS = 10
_GAIN = 1e-6  # relative: the least that a change must save
_HALVINGS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A plan and its step time by Sailor's rule."""

    copies: tuple[ColumnCount, ...]
    step_s: float


def best_by_rule(
    rule: SailorRule,
    num_gpus: dict[str, int],
    known: Sequence[Sequence[ColumnCount]] = (),
) -> Judged:
    """Return the best plan found; `known` plans are starting points, too."""
    starts = [_counts(copies) for copies in known]
    degrees = sorted({option.tensor for option in rule.problem.options})
    for among in (degrees, degrees[-1:]):  # unlike degrees make long sums
        starts += _fast_pipelines(rule, num_gpus, among)
    found = {frozenset(counts.items()): judged(rule, counts) for counts in starts}
    best = sorted(filter(None, found.values()), key=lambda one: one.step_s)
    return min(
        (improved(rule, start) for start in best[:_NUM_STARTS]),
        key=lambda one: one.step_s,
    )


def judged(rule: SailorRule, counts: Counts) -> Judged | None:
    """Share the batch out so that the slowest pipeline is as fast as possible.

    None if memory does not allow the batch.
    """
    p = rule.problem
    columns = {template: rule.pipeline(template) for template in counts}
    pipeline_s = _least_s(p, columns, counts)
    if pipeline_s is None:
        return None
    copies = _shared_out(p, columns, counts, pipeline_s)
    return Judged(copies=tuple(copies), step_s=rule.step_s(copies))


def improved(rule: SailorRule, start: Judged) -> Judged:
    """Apply the best of all small changes as long as one helps."""
    best = start
    while True:
        tried = (judged(rule, counts) for counts in _steps(rule, _counts(best.copies)))
        better = min(filter(None, tried), key=lambda one: one.step_s, default=best)
        if better.step_s > best.step_s * (1 - _GAIN):
            return best
        best = better


def _fast_pipelines(
    rule: SailorRule, num_gpus: dict[str, int], degrees: Sequence[int]
) -> Iterator[Counts]:
    """Yield plans of least time without sums, within limits on a device's weights."""
    p, batch = rule.problem, rule.problem.global_batch
    some = without_sums(published_problem(rule.published, num_gpus, batch, degrees))
    numbers = [p.options.index(option) for option in some.options]
    most_bytes = FLOAT_BYTES * float(parameters_L(rule.published).sum())
    least_bytes = _LEAST_SHARE * most_bytes
    while most_bytes > least_bytes:
        try:
            within = _within(some, rule.published, most_bytes)
            copies = candidates(within, "closed")[0].copies
        except NoFeasiblePlan:
            return
        counts = _counts([_renumbered(c, numbers) for c in copies])
        yield counts
        # any limit between the bytes that the plan holds and this one gives it again
        most_bytes = min(most_bytes, _held_bytes(rule, counts)) * _NEXT_LIMIT


def _held_bytes(rule: SailorRule, counts: Counts) -> float:
    """Return the most bytes of weights on a device."""
    params_L, options = parameters_L(rule.published), rule.problem.options
    return FLOAT_BYTES * max(
        float(params_L[slice(*stage.layers)].sum()) / options[stage.option].tensor
        for template in counts
        for stage in template.stages
    )


def _within(p: Problem, published: Published, most_bytes: float) -> Problem:
    """Return the problem with at most `most_bytes` of weights per device."""
    before_J = np.concatenate([[0.0], parameters_L(published).cumsum()])
    most_BOU = p.most_in_flight_BOU.copy()
    for start, end in zip(*np.triu_indices(p.num_layers + 1, k=1), strict=True):
        size_bytes = FLOAT_BYTES * (before_J[end] - before_J[start])
        for o, option in enumerate(p.options):
            if size_bytes / option.tensor > most_bytes:
                most_BOU[:, o, p.range_IJ[start, end]] = 0
    return replace(p, most_in_flight_BOU=most_BOU)


def _renumbered(copies: ColumnCount, numbers: Sequence[int]) -> ColumnCount:
    template = copies.template
    stages = tuple(replace(s, option=numbers[s.option]) for s in template.stages)
    return replace(copies, template=replace(template, stages=stages))


def _counts(copies: Sequence[ColumnCount]) -> Counts:
    counts = Counter[Template]()
    for c in copies:
        counts[c.template] += c.num_copies
    return counts


def _least_s(
    p: Problem, columns: dict[Template, Column], counts: Counts
) -> float | None:
    """Return the pipelines' least seconds for the batch; None if memory forbids it."""

    def does(step_s: float) -> bool:
        done = [
            n * _most(columns[t], step_s) * t.microbatch_size for t, n in counts.items()
        ]
        return sum(done) >= p.global_batch

    low_s = 0.0
    high_s = max(column.time_s(p.global_batch) for column in columns.values())
    if not does(high_s):
        return None
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle_s) if does(middle_s) else (middle_s, high_s)
    return high_s


def _most(column: Column, step_s: float) -> int:
    """Return how many microbatches a pipeline of the closed form does in `step_s`."""
    ((offset_s, slope_s),) = column.pieces
    most = int((step_s - column.after_s - offset_s) / slope_s)
    return min(max(most, 0), column.memory_microbatches)


def _shared_out(
    p: Problem, columns: dict[Template, Column], counts: Counts, step_s: float
) -> list[ColumnCount]:
    """Return counts that do exactly the batch, no pipeline in more than `step_s`."""
    most = {template: _most(column, step_s) for template, column in columns.items()}
    over = (
        sum(n * most[t] * t.microbatch_size for t, n in counts.items()) - p.global_batch
    )
    copies = []
    for template in sorted(counts, key=lambda t: -t.microbatch_size):
        num, did = counts[template], most[template]
        spared = min(over // template.microbatch_size, num * did)
        over -= spared * template.microbatch_size
        each, some = divmod(spared, num)
        for num_copies, fewer in ((num - some, each), (some, each + 1)):
            if num_copies and did > fewer:
                copies.append(
                    ColumnCount(
                        template=template,
                        num_copies=num_copies,
                        num_microbatches=did - fewer,
                    )
                )
    return copies


def _steps(rule: SailorRule, counts: Counts) -> Iterator[Counts]:
    """Yield plans with one small change that fit on the devices."""
    for changed in _changes(rule.problem, counts):
        left = +Counter(changed)
        used_O = Counter[int]()
        for template, num in left.items():
            for stage in template.stages:
                used_O[stage.option] += num
        taken = sum(num * rule.problem.used_OC[o] for o, num in used_O.items())
        if left and (taken <= rule.problem.devices_C).all():
            yield left


def _changes(p: Problem, counts: Counts) -> Iterator[Counter[Template]]:
    for template, num in counts.items():
        for other in [*counts, None]:
            for more in range(3) if other != template else (2,):
                changed = Counter(counts)
                changed[template] -= 1
                if other is not None:
                    changed[other] += more
                yield changed
        for other in _neighbours(p, template):
            for moved in {1, num}:
                changed = Counter(counts)
                changed[template] -= moved
                changed[other] += moved
                yield changed
    for start in {stage.layers[0] for t in counts for stage in t.stages} - {0}:
        for by in (-1, 1):  # the same cut in all pipelines: rings stay whole
            changed = Counter[Template]()
            for template, num in counts.items():
                changed[_cut_elsewhere(template, start, by)] += num
            if all(_is_whole(p, template) for template in changed):
                yield changed


def _neighbours(p: Problem, template: Template) -> Iterator[Template]:
    """Yield templates with another microbatch size, or one cut or option changed."""
    tried = [replace(template, microbatch_size=size) for size in p.microbatch_sizes]
    for n, stage in enumerate(template.stages):
        tried += [_cut_elsewhere(template, stage.layers[0], by) for by in (-1, 1)]
        for option in range(len(p.options)):
            stages = list(template.stages)
            stages[n] = replace(stage, option=option)
            tried.append(replace(template, stages=tuple(stages)))
    for other in dict.fromkeys(tried):
        if other != template and _is_whole(p, other):
            yield other


def _cut_elsewhere(template: Template, start: int, by: int) -> Template:
    """Return the template with its cut before layer `start`, if any, moved by `by`."""
    moved = lambda at: at + by if at == start and 0 < at else at  # noqa: E731
    stages = [
        TemplateStage(option=s.option, layers=(moved(s.layers[0]), moved(s.layers[1])))
        for s in template.stages
    ]
    return replace(template, stages=tuple(stages))


def _is_whole(p: Problem, template: Template) -> bool:
    """Return whether no stage is empty, and each fits a microbatch in memory."""
    filled = all(s.layers[0] < s.layers[1] for s in template.stages)
    return filled and exists(p, template)
