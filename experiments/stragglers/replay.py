# SPDX-License-Identifier: Apache-2.0
"""Replays a step with other times for some operations.

An operation starts when all operations that it waits for have ended. An operation
outside any group then takes its own time. Each operation of a communication group ends
at the latest start in the group plus its transfer time, which is measured as its end
less that latest start. "Without stragglers" every operation takes the mean of its type,
communication the median. These rules are those of the authors of the traces
("Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025,
arXiv 2505.05713), as README-2 of the ground truth states them; the code is ours. Owns
the replay and these what-ifs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from experiments.stragglers.trace import Floats, Trace

# types that do work; all others are communication
_WORK = frozenset({"forward-compute", "backward-compute", "gc", "optimizer"})
_IMPOSSIBLE_S = -0.010  # no end is this far before the latest start: clocks differ less
_WORST = 0.03  # share of the workers that count as the worst


def own_times(trace: Trace) -> Floats:
    """Return own_SDO: the measured time of each operation by itself."""
    end_SDO, own_SDO = trace.start_SDO + trace.duration_SDO, trace.duration_SDO.copy()
    for members in trace.members():
        replicas, ops = map(list, zip(*members, strict=True))
        latest_S = trace.start_SDO[:, replicas, ops].max(axis=1)
        late_SM = end_SDO[:, replicas, ops] - latest_S[:, None]
        own_SDO[:, replicas, ops] = np.where(late_SM <= _IMPOSSIBLE_S, 0.0, late_SM)
    return own_SDO


def without_stragglers(trace: Trace, own_SDO: Floats) -> Floats:
    """Return ideal_SDO: one time for each type, in all steps and places."""
    ideal_SDO = np.empty_like(own_SDO)
    types = np.array([op.type for op in trace.ops])
    for name in np.unique(types):
        of_type = own_SDO[:, :, types == name]
        typical = np.mean if name in _WORK else np.median
        ideal_SDO[:, :, types == name] = typical(of_type)
    return ideal_SDO


def replay(trace: Trace, own_SDO: Floats) -> Floats:
    """Return the step times, step_S, if operations take the times own_SDO."""
    start_SDO, end_SDO = np.zeros_like(own_SDO), np.zeros_like(own_SDO)
    for members in _in_order(trace):
        latest_S = np.full(len(own_SDO), -np.inf)
        for d, o in members:
            for before in trace.ops[o].after:
                start_SDO[:, d, o] = np.maximum(
                    start_SDO[:, d, o], end_SDO[:, d, before]
                )
            latest_S = np.maximum(latest_S, start_SDO[:, d, o])
        for d, o in members:
            end_SDO[:, d, o] = latest_S + own_SDO[:, d, o]
    flat = (len(own_SDO), -1)
    return end_SDO.reshape(flat).max(axis=1) - start_SDO.reshape(flat).min(axis=1)


def _in_order(trace: Trace) -> Iterator[list[tuple[int, int]]]:
    """Yield groups that end together, each after all that it waits for."""
    every = [(d, o) for d in range(trace.num_replicas) for o in range(len(trace.ops))]
    group_of = {pair: [pair] for pair in every}
    for members in trace.members():
        group_of |= dict.fromkeys(members, members)
    left = {
        id(group): len({(d, b) for d, o in group for b in trace.ops[o].after})
        for group in group_of.values()
    }
    waiting: dict[tuple[int, int], list[list[tuple[int, int]]]] = {}
    for group in {id(group): group for group in group_of.values()}.values():
        for before in {(d, b) for d, o in group for b in trace.ops[o].after}:
            waiting.setdefault(before, []).append(group)
    ready = [
        g for g in {id(g): g for g in group_of.values()}.values() if not left[id(g)]
    ]
    num_done = 0
    while ready:
        group = ready.pop()
        num_done += len(group)
        yield group
        for pair in group:
            for other in waiting.get(pair, ()):
                left[id(other)] -= 1
                if not left[id(other)]:
                    ready.append(other)
    assert num_done == len(every), "operations wait for each other"


@dataclass(frozen=True)
class WhatIf:
    """The steps of a trace, replayed with some operations at ideal times."""

    trace: Trace

    @cached_property
    def own_SDO(self) -> Floats:
        return own_times(self.trace)

    @cached_property
    def ideal_SDO(self) -> Floats:
        return without_stragglers(self.trace, self.own_SDO)

    @cached_property
    def replayed_s(self) -> float:
        """Mean step time of the replay with measured times."""
        return float(replay(self.trace, self.own_SDO).mean())

    @cached_property
    def ideal_s(self) -> float:
        """Mean step time without stragglers."""
        return float(replay(self.trace, self.ideal_SDO).mean())

    @property
    def slowdown(self) -> float:
        return self.replayed_s / self.ideal_s

    def only(self, is_slow_DO: NDArray[np.bool_]) -> float:
        """Return the slowdown if only these operations took their measured times."""
        times_SDO = np.where(is_slow_DO, self.own_SDO, self.ideal_SDO)
        return float(replay(self.trace, times_SDO).mean()) / self.ideal_s

    def cured(self, is_slow_DO: NDArray[np.bool_]) -> float:
        """Return the share of the lost time that ideal times of these would recover."""
        times_SDO = np.where(is_slow_DO, self.ideal_SDO, self.own_SDO)
        mean_s = float(replay(self.trace, times_SDO).mean())
        return (self.replayed_s - mean_s) / (self.replayed_s - self.ideal_s)

    def by_replica(self) -> dict[int, float]:
        """Return the slowdown by each data-parallel replica alone."""
        return {
            d: self.only(self._places(np.arange(self.trace.num_replicas) == d, None))
            for d in range(self.trace.num_replicas)
        }

    def by_stage(self) -> dict[int, float]:
        """Return the slowdown by each stage alone, in all replicas."""
        stages = np.unique(self.trace.stage_O)
        return {int(s): self.only(self._places(None, int(s))) for s in stages}

    def last_stage_cures(self) -> float:
        """Return the authors' M_S."""
        return self.cured(self._places(None, int(self.trace.stage_O.max())))

    def worst_workers(self) -> list[tuple[int, int]]:
        """Return the worst 3 % of (replica, stage), by their lesser slowdown."""
        by_replica, by_stage = self.by_replica(), self.by_stage()
        score = {
            (d, s): min(x, y)
            for d, x in by_replica.items()
            for s, y in by_stage.items()
        }
        number = max(1, round(_WORST * len(score)))
        return sorted(score, key=lambda worker: -score[worker])[:number]

    def worst_workers_cure(self) -> float:
        """Return the authors' M_W."""
        worst = np.zeros(self.own_SDO.shape[1:], bool)
        for d, s in self.worst_workers():
            worst |= self._places(np.arange(self.trace.num_replicas) == d, s)
        return self.cured(worst)

    def culprit(self) -> str:
        """Return the place whose ideal times recover most of the loss."""
        if self.last_stage_cures() > self.worst_workers_cure():
            return f"last stage ({int(self.trace.stage_O.max())})"
        workers = [f"worker dp {d}, stage {s}" for d, s in self.worst_workers()]
        return "; ".join(workers)

    def _places(
        self, replicas_D: NDArray[np.bool_] | None, stage: int | None
    ) -> NDArray[np.bool_]:
        every = np.ones(self.own_SDO.shape[1:], bool)
        if replicas_D is not None:
            every &= replicas_D[:, None]
        return every if stage is None else every & (self.trace.stage_O == stage)
