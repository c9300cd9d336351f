# SPDX-License-Identifier: Apache-2.0
"""Builds plain columns: pipelines of one kind of device, with the same option in all
stages, cut so that the slowest stage is as fast as possible.

Owns these columns for every option and number of stages, and the choice of those for
the first master problem. They are only a good start, but on large clusters, where
pricing is cut short, they are often the final columns. Does not own pricing
(`pricing.py`).

Letters of array names as in `model/problem.py`; N pipelines, of S stages each.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hetjax.planner.bound.restricted_master import reaches
from hetjax.planner.model.problem import Floats, Ints, Problem
from hetjax.planner.model.templates import (
    Column,
    Form,
    Template,
    TemplateStage,
    column,
    shown_s,
    stacked,
)

_HALVINGS = 10  # bisection steps for the time of the slowest stage, and of a step
_MOST_OF_CLASS = 12  # columns of each class of devices
_SLACKS = (1.0, 1.03, 1.06, 1.12, 1.25)  # times the step without hops


def plain_start(p: Problem, form: Form) -> tuple[tuple[Column, ...], float] | None:
    """Return plain columns, and a step time in which fractions of copies of them
    compute the global batch; None if there are none."""
    pipelines = _Pipelines.from_problem(p)
    if pipelines is None or not pipelines.do(np.inf):
        return None
    least_s = pipelines.least_step_s()
    for slack in _SLACKS:
        columns = pipelines.columns(form, slack * least_s)
        if columns and reaches(p, stacked(columns), slack * least_s):
            return tuple(columns), slack * least_s
    return None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pipelines:
    """Pipelines by row: microbatch size b, option o and cuts. Times without hops: the
    slowest stage, the sum of stages, and the terms after the pipeline."""

    p: Problem
    b_N: Ints
    o_N: Ints
    cuts_N: list[Ints]
    slowest_s_N: Floats
    fill_s_N: Floats
    after_s_N: Floats

    @classmethod
    def from_problem(cls, p: Problem) -> "_Pipelines | None":
        parts = [_timed(p, *cut) for cut in _cut_evenly(p)]
        if not parts:
            return None
        b_N, o_N, cuts, slowest_s_N, fill_s_N, after_s_N = zip(*parts, strict=True)
        return cls(
            p=p,
            b_N=np.concatenate(b_N),
            o_N=np.concatenate(o_N),
            cuts_N=[row for each in cuts for row in each],
            slowest_s_N=np.concatenate(slowest_s_N),
            fill_s_N=np.concatenate(fill_s_N),
            after_s_N=np.concatenate(after_s_N),
        )

    def columns(self, form: Form, step_s: float) -> list[Column]:
        """Return, for each class, the columns with the most sequences per device in a
        step: the best for each number of devices."""
        found: list[Column] = []
        class_N, worth_N = self._class_N, self._worth(step_s)
        for c in range(len(self.p.classes)):
            rows = np.flatnonzero((class_N == c) & (worth_N > 0))
            rows = rows[np.argsort(-worth_N[rows], kind="stable")]
            _, firsts = np.unique(self._devices_N[rows], return_index=True)
            best = rows[np.sort(firsts)[:_MOST_OF_CLASS]]
            found += [column(self.p, self._template(n), form) for n in best]
        return [c for c in found if c.memory_microbatches and c.serves_hops]

    def least_step_s(self) -> float:
        """Return about the least step in which they compute the batch. There must be
        one."""
        low_s, high_s = 0.0, float((self.fill_s_N + self.after_s_N).max())
        while not self.do(high_s):
            low_s, high_s = high_s, 2 * high_s
        for _ in range(_HALVINGS):
            middle_s = (low_s + high_s) / 2
            if self.do(middle_s):
                high_s = middle_s
            else:
                low_s = middle_s
        return high_s

    def do(self, step_s: float) -> bool:
        """Return whether fractions of copies compute the batch in such a step."""
        worth_C = np.zeros(len(self.p.classes))
        np.maximum.at(worth_C, self._class_N, self._worth(step_s))
        return float(worth_C @ self.p.devices_C) >= self.p.global_batch

    @cached_property
    def _devices_N(self) -> Floats:
        stages_N = np.array([len(cuts) - 1 for cuts in self.cuts_N])
        return self.p.used_OC.sum(axis=1)[self.o_N] * stages_N

    @cached_property
    def _class_N(self) -> Ints:
        return np.array([o.device_class for o in self.p.options])[self.o_N]

    def _worth(self, step_s: float) -> Floats:
        """Return the sequences of each pipeline in a step, per device."""
        left_s_N = step_s - self.after_s_N - self.fill_s_N
        sizes_N = np.array(self.p.microbatch_sizes)[self.b_N]
        most_N = np.floor(left_s_N / self.slowest_s_N) + 1
        sequences_N = sizes_N * np.minimum(most_N, self.p.global_batch // sizes_N)
        if self.p.one_replica:
            sequences_N *= sequences_N == self.p.global_batch
        return np.where(left_s_N >= 0, sequences_N / self._devices_N, 0.0)

    def _template(self, n: int) -> Template:
        cuts, option = self.cuts_N[n].tolist(), int(self.o_N[n])
        return Template(
            microbatch_size=self.p.microbatch_sizes[self.b_N[n]],
            stages=tuple(
                TemplateStage(option=option, layers=layers)
                for layers in zip(cuts[:-1], cuts[1:], strict=True)
            ),
        )


def _cut_evenly(p: Problem) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Yield, for every number of stages, sizes b_N, options o_N and cuts_NJ of all
    pipelines that fit into memory and on the devices."""
    most_stages_O = (p.room_R // np.maximum(p.taken_OR, 0.5)).min(axis=1)
    whole_s_BO = np.nan_to_num(p.busy_s_BOU[:, :, p.range_IJ[0, -1]], nan=np.inf)
    for num_stages in range(1, min(p.max_launch_ahead, p.num_layers) + 1):
        there_BO = np.isfinite(whole_s_BO) & (most_stages_O >= num_stages)
        b_N, o_N = np.nonzero(there_BO)
        high_s_N = whole_s_BO[b_N, o_N]
        holds_N = _cut(p, b_N, o_N, num_stages, high_s_N)[:, -1] == p.num_layers
        b_N, o_N, high_s_N = b_N[holds_N], o_N[holds_N], high_s_N[holds_N]
        if not len(b_N):
            continue
        low_s_N = high_s_N / num_stages
        for _ in range(_HALVINGS):
            middle_s_N = (low_s_N + high_s_N) / 2
            cuts_NJ = _cut(p, b_N, o_N, num_stages, middle_s_N)
            done_N = cuts_NJ[:, -1] == p.num_layers
            high_s_N = np.where(done_N, middle_s_N, high_s_N)
            low_s_N = np.where(done_N, low_s_N, middle_s_N)
        yield b_N, o_N, _cut(p, b_N, o_N, num_stages, high_s_N)


def _cut(p: Problem, b_N: Ints, o_N: Ints, num_stages: int, most_s_N: Floats) -> Ints:
    """Return cuts that give each stage in turn as many layers as time and memory allow,
    but leave one for each later stage; (N, S + 1)."""
    cuts = [np.zeros(len(b_N), dtype=np.int64)]
    for after in reversed(range(num_stages)):
        rows_NJ = p.range_IJ[cuts[-1], : p.num_layers - after + 1]
        at = b_N[:, None], o_N[:, None], rows_NJ
        fits_NJ = (p.busy_s_BOU[at] <= most_s_N[:, None]) & (rows_NJ >= 0)
        fits_NJ &= p.most_in_flight_BOU[at] > after
        last_N = fits_NJ.shape[1] - 1 - fits_NJ[:, ::-1].argmax(axis=1)
        cuts.append(np.where(fits_NJ.any(axis=1), last_N, cuts[-1]))
    return np.stack(cuts, axis=1)


def _timed(
    p: Problem, b_N: Ints, o_N: Ints, cuts_NJ: Ints
) -> tuple[Ints, Ints, Ints, Floats, Floats, Floats]:
    """Return the arguments, with the seconds of the slowest stage, of all stages, and
    of the terms after the pipeline."""
    at = b_N[:, None], o_N[:, None], p.range_IJ[cuts_NJ[:, :-1], cuts_NJ[:, 1:]]
    busy_s_NS, after_s_ANS = p.busy_s_BOU[at], p.after_s_ABOU[(slice(None), *at)]
    after_s_N = shown_s(p, after_s_ANS, p.drain_s_BOU[at]).sum(axis=0)
    return b_N, o_N, cuts_NJ, busy_s_NS.max(axis=1), busy_s_NS.sum(axis=1), after_s_N
