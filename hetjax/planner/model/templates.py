# SPDX-License-Identifier: Apache-2.0
"""Templates: pipelines that are not yet on nodes, and their times.

Owns the template and its time as a function of its microbatch count m: after_s + max
over pieces of (offset_s + m * slope_s). Two forms:

* `prefix`, a lower bound for all 1F1B-like programs (`schedule/bound.py`);
* `closed`, the usual estimate: sum of all t_s + 2 c_s, plus m - 1 times the slowest.

Does not own how templates are found (`bound/pricing.py`) nor how many of each are taken
(`search/price_and_branch.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hetjax.planner.model.problem import UNLIMITED, Floats, Ints, Problem
from hetjax.plans.plan import LayerRange
from hetjax.schedule.bound import prefix_pieces
from hetjax.schedule.launch_ahead import exact_delta, from_deltas, plain_delta

Form = Literal["prefix", "closed"]

ROUNDING = 1e-9  # relative: numbers that differ by less count as equal


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateStage:
    """A range of layers under one of the problem's options (by index)."""

    option: int
    layers: LayerRange


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """The stages of one pipeline, first layers first."""

    microbatch_size: int
    stages: tuple[TemplateStage, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A template with its time, and what it takes of every limit on devices.

    `memory_microbatches` is how many microbatches memory allows. It is `UNLIMITED`
    unless a stage cannot hold as many in flight as its place in the pipeline needs.
    `sum_s` is the part of `after_s` that is the gradient sum, for whose end all
    pipelines wait (0 where each has its own). `serves_hops` is whether memory also
    holds the launch-ahead that slow hops need. Without it the closed form is too
    optimistic; the prefix form does not need it. `weight` is what a sequence takes of
    the limit on work.
    """

    template: Template
    pieces: tuple[tuple[float, float], ...]  # (offset_s, slope_s)
    after_s: float
    sum_s: float
    taken: tuple[int, ...]
    memory_microbatches: int
    serves_hops: bool
    weight: float = 0.0

    def time_s(self, num_microbatches: int) -> float:
        """Return the seconds of so many microbatches, by the column's form."""
        return self.after_s + max(o + num_microbatches * s for o, s in self.pieces)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Columns:
    """Columns as arrays, one row each. Columns with fewer pieces repeat their first.
    `memory_N` is their `memory_microbatches`."""

    templates: tuple[Template, ...]
    sizes_N: Ints
    pieces_NP2: Floats
    after_s_N: Floats
    sum_s_N: Floats
    taken_NR: Floats
    memory_N: Ints
    weight_N: Floats

    def __len__(self) -> int:
        return len(self.templates)

    def rows(self, rows: Ints) -> "Columns":
        """Return the columns with these row numbers, in this order."""
        return Columns(
            templates=tuple(self.templates[n] for n in rows),
            sizes_N=self.sizes_N[rows],
            pieces_NP2=self.pieces_NP2[rows],
            after_s_N=self.after_s_N[rows],
            sum_s_N=self.sum_s_N[rows],
            taken_NR=self.taken_NR[rows],
            memory_N=self.memory_N[rows],
            weight_N=self.weight_N[rows],
        )

    def beside(self, longest_s: float) -> "Columns":
        """Return the columns with `sum_s` up to `longest_s`, raised to `longest_s`:
        all pipelines wait for the longest sum."""
        few = self.rows(np.flatnonzero(self.sum_s_N <= longest_s))
        after_s_N = few.after_s_N - few.sum_s_N + longest_s
        sum_s_N = np.full_like(few.sum_s_N, longest_s)
        return replace(few, after_s_N=after_s_N, sum_s_N=sum_s_N)


def stacked(columns: Sequence[Column]) -> Columns:
    """Return columns as arrays."""
    width = max((len(c.pieces) for c in columns), default=1)
    pieces = [(*c.pieces, *[c.pieces[0]] * (width - len(c.pieces))) for c in columns]
    limits = len(columns[0].taken) if columns else 0
    taken_NR = np.array([c.taken for c in columns], dtype=np.float64)
    return Columns(
        templates=tuple(c.template for c in columns),
        sizes_N=np.array([c.template.microbatch_size for c in columns], dtype=int),
        pieces_NP2=np.array(pieces).reshape(len(columns), width, 2),
        after_s_N=np.array([c.after_s for c in columns]),
        sum_s_N=np.array([c.sum_s for c in columns]),
        taken_NR=taken_NR.reshape(len(columns), limits),
        memory_N=np.array([c.memory_microbatches for c in columns], dtype=int),
        weight_N=np.array([c.weight for c in columns]),
    )


def column(p: Problem, template: Template, form: Form) -> Column:
    """Return the template with its costs, its time by `form`."""
    stage_s, hop_s, link_s = _stage_s(p, template)
    if form == "prefix":
        pieces = prefix_pieces(stage_s, [2 * s for s in hop_s], link_s)
    else:
        fill_s, most_s = sum(stage_s) + sum(2 * s for s in hop_s), max(stage_s + link_s)
        pieces = ((fill_s - most_s, most_s),)
    taken = p.taken_OR[[s.option for s in template.stages]].sum(axis=0)
    shown_s_A = _shown_s_A(p, template)
    slowest_s = max(slope for _, slope in pieces)
    least, served = (
        from_deltas([delta(s, slowest_s, False) for s in hop_s])
        for delta in (plain_delta, exact_delta)
    )
    return Column(
        template=template,
        pieces=pieces,
        after_s=float(shown_s_A.sum()),
        sum_s=float(shown_s_A[p.is_drained_A].sum()),
        taken=tuple(int(n) for n in taken),
        memory_microbatches=_memory_microbatches(p, template, least),
        serves_hops=form == "prefix"
        or _memory_microbatches(p, template, served) == UNLIMITED,
        weight=_weight(p, template),
    )


def exists(p: Problem, template: Template) -> bool:
    """Return whether a template of an earlier problem is also one of this problem."""
    if template.microbatch_size not in p.microbatch_sizes:
        return False
    if template.stages[-1].layers[1] != p.num_layers:
        return False
    if any(s.option >= len(p.options) for s in template.stages):
        return False
    return _memory_microbatches(p, template, [1] * len(template.stages)) > 0


def most_microbatches(columns: Columns, step_s: float) -> Ints:
    """Return how many microbatches each column can do in a step of that time."""
    offset_s_NP, slope_s_NP = np.moveaxis(columns.pieces_NP2, -1, 0)
    counts = counted(step_s - columns.after_s_N[:, None] - offset_s_NP, slope_s_NP)
    return np.minimum(counts.min(axis=1), columns.memory_N)


def counted(left_s: Floats, each_s: Floats) -> Ints:
    """Return how often `each_s` goes into `left_s`; at least 0."""
    return np.maximum(np.floor(left_s / each_s * (1 + ROUNDING)), 0).astype(np.int64)


def _stage_s(
    p: Problem, template: Template
) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds that each stage is busy with a microbatch, those of each
    message after it, one way, and how long that holds its link."""
    b = p.microbatch_sizes.index(template.microbatch_size)
    stages = template.stages
    seconds = [float(p.busy_s_BOU[b, s.option, p.range_IJ[s.layers]]) for s in stages]
    hop_s, link_s = [], []
    for s in range(len(stages) - 1):
        at = b, p.kind_J[stages[s].layers[1]], stages[s].option, stages[s + 1].option
        long = s == 0 and len(stages) >= p.long_from
        seconds[s] += p.send_s_BKOO[at] * (p.long_first_factor if long else 1.0)
        last = s == len(stages) - 2
        seconds[s + 1] += p.return_s_BKOO[at] * (p.last_factor if last else 1.0)
        hop_s.append(float(p.hop_s_BKOO[at]))
        link_s.append(float(p.link_s_BKOO[at]))
    return seconds, hop_s, link_s


def _shown_s_A(p: Problem, template: Template) -> Floats:
    b = p.microbatch_sizes.index(template.microbatch_size)
    options_S = np.array([s.option for s in template.stages])
    rows_S = np.array([p.range_IJ[s.layers] for s in template.stages])
    after_s_AS = p.after_s_ABOU[:, b, options_S, rows_S]
    return shown_s(p, after_s_AS, p.drain_s_BOU[b, options_S, rows_S])


def shown_s(p: Problem, after_s_AXS: Floats, drain_s_XS: Floats) -> Floats:
    """Return the terms after pipelines of such stages, (A, X); X may be any dims."""
    before_s_XS = np.cumsum(drain_s_XS, axis=-1) - drain_s_XS
    shown_s_AX = []
    for exposed, after_s_XS in zip(p.exposed, after_s_AXS, strict=True):
        if exposed == "first":
            shown_s_AX.append(after_s_XS[..., 0])
        else:
            hidden_s_XS = before_s_XS if exposed == "drained" else 0.0
            shown_s_AX.append((after_s_XS - hidden_s_XS).max(axis=-1))
    return np.stack(shown_s_AX)


def _weight(p: Problem, template: Template) -> float:
    if p.work_limit is None:
        return 0.0
    weight_OU = p.work_limit.weight_OU
    return float(
        sum(weight_OU[s.option, p.range_IJ[s.layers]] for s in template.stages)
    )


def _memory_microbatches(p: Problem, template: Template, aheads: Sequence[int]) -> int:
    b = p.microbatch_sizes.index(template.microbatch_size)
    allowed = UNLIMITED
    for stage, ahead in zip(template.stages, aheads, strict=True):
        most = int(p.most_in_flight_BOU[b, stage.option, p.range_IJ[stage.layers]])
        if most < ahead:
            allowed = min(allowed, most)
    return allowed
