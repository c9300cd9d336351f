# SPDX-License-Identifier: Apache-2.0
"""Records when every compute action of some steps ran, as spans on devices.

Owns which actions are shown. Does not own when an action ran (`action_watch.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hetjax.plans.plan import Plan
from hetjax.runtime.execution.action_watch import ActionWatch
from hetjax.schedule.programs.action import Action, Op, StageKey
from hetjax.schedule.simulation.trace import Span

SHOWN = {Op.F, Op.B, Op.FB, Op.I, Op.W, Op.E, Op.REDUCE, Op.NORM, Op.UPDATE}


class Timeline:
    """An `ActionObserver`; times of its spans are those of `ActionWatch`."""

    def __init__(self, plan: Plan) -> None:
        self._lanes: Mapping[StageKey, tuple[str, Sequence[int]]] = {
            (r, s): (stage.node, stage.devices) for r, s, stage in plan.stages()
        }
        self._actions = ActionWatch()
        self._spans: list[Span] = []

    def enqueued(self, action: Action, start_s: float, end_s: float, made: Any) -> None:
        if action.op in SHOWN | {Op.RECV} and made is not None:
            self._actions.watch(action, start_s, made, self._seen)

    def spans(self) -> list[Span]:
        """Wait for all actions seen so far, and return them."""
        self._actions.wait()
        return list(self._spans)

    def _seen(self, action: Action, start_s: float, end_s: float) -> None:
        if action.op in SHOWN:
            node, devices = self._lanes[action.key]
            self._spans += [Span(node, d, action, start_s, end_s) for d in devices]
