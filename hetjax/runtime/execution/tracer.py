# SPDX-License-Identifier: Apache-2.0
"""Measure when every compute action really ran, without slowing the driver.

One watching thread per stage waits for the arrays that its actions make, in order.
A stage's programs run one after the other on its devices, so an action starts when it
is enqueued, when its predecessor ends or when what it receives arrives, whichever is
last. Waiting in a collective (REDUCE, NORM) counts as part of it.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from hetjax.plans.plan import Plan
from hetjax.schedule.programs.action import Action, Op, StageKey
from hetjax.schedule.simulation.trace import Span

SHOWN = {Op.F, Op.B, Op.FB, Op.I, Op.W, Op.E, Op.REDUCE, Op.NORM, Op.UPDATE}


class Timeline:
    """An `Observer`; times of its spans are this process's `time.perf_counter`."""

    def __init__(self, plan: Plan) -> None:
        self._lanes: Mapping[StageKey, tuple[str, Sequence[int]]] = {
            (r, s): (stage.node, stage.devices) for r, s, stage in plan.stages()
        }
        self._watchers = {key: ThreadPoolExecutor(1) for key in self._lanes}
        self._free_s = dict.fromkeys(self._lanes, 0.0)
        self._spans: list[Span] = []

    def enqueued(self, action: Action, start_s: float, end_s: float, made: Any) -> None:
        if action.op in SHOWN | {Op.RECV} and made is not None:
            self._watchers[action.key].submit(self._watch, action, start_s, made)

    def spans(self) -> list[Span]:
        """Wait for all actions seen so far, and return them."""
        for watcher in self._watchers.values():
            watcher.submit(lambda: None).result()
        return list(self._spans)

    def _watch(self, action: Action, enqueued_s: float, made: Any) -> None:
        live = [array for array in jax.tree.leaves(made) if not array.is_deleted()]
        try:
            jax.block_until_ready(live)
        except RuntimeError:
            pass  # donated while we waited, and only a finished step donates
        end_s = time.perf_counter()
        start_s = max(enqueued_s, self._free_s[action.key])
        self._free_s[action.key] = end_s
        if action.op in SHOWN:
            node, devices = self._lanes[action.key]
            self._spans += [Span(node, d, action, start_s, end_s) for d in devices]
