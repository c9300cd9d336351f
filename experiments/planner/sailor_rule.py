# SPDX-License-Identifier: Apache-2.0
"""Computes the step time of a plan by Sailor's own rule (SOSP 2025), in our reading.

The step is the slowest pipeline, then the longest gradient sum: all wait for all. Each
layer is summed on one ring of all replicas. In the ring, replicas of a kind are
neighbours, and the slowest link, also one between unlike kinds, sets the ring's speed.
Layers between two adjacent cuts of any replicas are summed together. The sum of a stage
is that of all its layers, one ring after the other. In a ring of unlike tensor degrees
the device with the largest share decides.

The pipelines are those of `published_terms.py`, which prices sums differently: there
each replica waits for its own sum only, on a ring of 16 of its own kind. Does not own
the search (`sailor_search.py`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, permutations

import numpy as np

from experiments.planner.published_terms import (
    FLOAT_BYTES,
    Published,
    fit_of,
    parameters_L,
    ring_s,
)
from hetjax.planner.model.problem import Option, Problem
from hetjax.planner.model.templates import Column, Template, TemplateStage, column
from hetjax.planner.search.integer_master import ColumnCount
from hetjax.plans.plan import LayerRange

Counts = Mapping[Template, int]  # copies of each


@dataclass(frozen=True, kw_only=True, eq=False)
class SailorRule:
    """Judges plans of a published problem, and caches the computed parts."""

    published: Published
    problem: Problem
    _columns: dict[Template, Column] = field(default_factory=dict)
    _rings: dict[tuple[object, ...], float] = field(default_factory=dict)

    def step_s(self, copies: Sequence[ColumnCount]) -> float:
        counts = Counter[Template]()
        for c in copies:
            counts[c.template] += c.num_copies
        pipelines_s = [
            self.pipeline(c.template).time_s(c.num_microbatches) for c in copies
        ]
        return float(max(pipelines_s)) + self.longest_sum_s(counts)

    def pipeline(self, template: Template) -> Column:
        """Return the template's costs without any sum."""
        if template not in self._columns:
            free = without_sums(self.problem)
            self._columns[template] = column(free, template, "closed")
        return self._columns[template]

    def longest_sum_s(self, counts: Counts) -> float:
        """Return the seconds of all sums of the stage whose sums take longest."""
        stages = [stage for template in counts for stage in template.stages]
        cuts = sorted({at for stage in stages for at in stage.layers})
        sum_s = {layers: self._sum_s(counts, layers) for layers in pairwise(cuts)}
        return max(
            sum(s for layers, s in sum_s.items() if _holds(stage, layers))
            for stage in stages
        )

    def _sum_s(self, counts: Counts, layers: LayerRange) -> float:
        holders = Counter[Option]()
        for template, num in counts.items():
            for stage in template.stages:
                if _holds(stage, layers):
                    holders[self.problem.options[stage.option]] += num
        kinds = Counter[int]()
        for option, num in holders.items():
            kinds[option.device_class] += num
        degree = min(option.tensor for option in holders)
        key = layers, degree, tuple(sorted(kinds.items()))
        if key not in self._rings:
            params = parameters_L(self.published)[slice(*layers)].sum()
            self._rings[key] = self._ring_s(kinds, FLOAT_BYTES * params / degree)
        return self._rings[key]

    def _ring_s(self, kinds: Mapping[int, int], size_bytes: float) -> float:
        num_members = sum(kinds.values())
        if num_members == 1:
            return 0.0
        gpus = [c.name for c in self.problem.classes]
        alone = {kind: Option(device_class=kind) for kind in kinds}
        pairs = [(kind, kind) for kind, num in kinds.items() if num > 1]
        links = [
            fit_of(self.published, gpus, alone[a], alone[b])
            for a, b in [*pairs, *permutations(kinds, 2)]
        ]
        return float(ring_s(links, np.array(size_bytes), num_members))


def without_sums(p: Problem) -> Problem:
    """Return the published problem with only the update after a pipeline."""
    sums_s_BOU, update_s_BOU = p.after_s_ABOU
    return replace(p, after_s_ABOU=np.stack([0 * sums_s_BOU, update_s_BOU]))


def _holds(stage: TemplateStage, layers: LayerRange) -> bool:
    return stage.layers[0] <= layers[0] and layers[1] <= stage.layers[1]
