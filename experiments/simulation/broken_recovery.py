# SPDX-License-Identifier: Apache-2.0
"""Breaks rules of commits, recovery, checkpoints and nodes: from 12 on.

Owns these mutations; each leaves out one check of the product. They follow from the
text of `docs/how/protocol.md` and do not depend on the simulation. Does not own their
installation (`breaking.py`), the other rules (`broken_messages.py`), nor the search for
them (`mutations.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from experiments.simulation.breaking import breaks, function, method
from hetjax.checkpoint import disk, recovery_plan
from hetjax.runtime.control import recovery, recovery_decisions
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.rpc import schema
from hetjax.runtime.rpc.worker_connections import WorkerLost
from hetjax.training.recovery import recovered
from hetjax.training.recovery.current_plan import CurrentPlan
from hetjax.training.recovery.driver import Driver
from hetjax.training.recovery.surviving_state import SurvivingState
from hetjax.training.saving import Saving

# --- a step

_committed_step = recovery_decisions.committed_step
Reached = Mapping[str, schema.Reached]


def _of_any_step(reached: Reached) -> Any:
    """Return the newest commit of any worker, even if a survivor is further."""
    steps = [r.at for r in reached.values() if r.commit and r.at is not None]
    upto = max(steps, default=-1)
    below = {w: r for w, r in reached.items() if r.at is None or r.at <= upto}
    return _committed_step(below)


def _all_behind_finish(reached: Reached) -> Any:
    commit, late = _committed_step(reached)
    newest_at = max((r.at for r in reached.values() if r.at is not None), default=0)
    behind = [w for w, r in reached.items() if r.at is not None and r.at < newest_at]
    return commit, behind if commit is not None else late


# --- recovery

_restore, _until = recovery.restore, recovery._until
_rounds, _newest = recovery._rounds, recovery_plan.newest
_count_loss, _held = Driver._count_loss, SurvivingState.held
_drop_state = Controller.drop_state


class _Unheeding:
    """Connections that ignore whether this kind of request is answered."""

    def __init__(self, connections: Any, what: type) -> None:
        self._connections, self._what = connections, what

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connections, name)

    def ask(self, requests: Mapping[str, Any], *args: Any) -> dict[str, Any]:
        if not any(isinstance(r, self._what) for r in requests.values()):
            return self._connections.ask(requests, *args)
        with suppress(WorkerLost):
            self._connections.ask(requests, *args)
        return {}


def _placed_or_not(controller: Any, *args: Any, **named: Any) -> Any:
    unheeding = _Unheeding(controller.connections, schema.PlaceState)
    with patch.object(controller, "connections", unheeding):
        return _restore(controller, *args, **named)


def _in_one_attempt(
    controller: Any, held: Sequence[Any], *args: Any, **named: Any
) -> Any:
    """Attribute all leaves of a step to its newest attempt."""
    newest: dict[int, str] = {}
    for step, attempt in (h.save for h in held):
        newest[step] = max(attempt, newest.get(step, ""))
    held = [replace(h, save=(h.save[0], newest[h.save[0]])) for h in held]
    return _restore(controller, held, *args, **named)


def _leaving_first(
    controller: Any, held: Any, storage: Any, others: Any = (), *args: Any, **named: Any
) -> Any:
    controller.connections.ask(dict.fromkeys(others, schema.Leave()))
    return _restore(controller, held, storage, others, *args, **named)


def _without_those_that_leave(
    controller: Any, held: Any, storage: Any, others: Any = (), *args: Any, **named: Any
) -> Any:
    stay = [h for h in held if h.worker not in others]
    return _restore(controller, stay, storage, others, *args, **named)


def _state_alone_dropped(controller: Any, storage: Any) -> None:
    kept, controller.saved = controller.saved, 1_000_000
    _drop_state(controller, storage)
    controller.saved = kept


def _one_round(
    controller: Any,
    others: Any,
    held: Any,
    save: Any,
    lacking: Any,
    size_bytes: Any,
    storage: Any,
) -> Any:
    """Continue after one round, whatever was missing in it."""
    unheard = lambda before, told: replace(before, step=save[0])  # noqa: E731
    complete: Any = _Complete(controller)
    with patch.object(recovery, "after_round", unheard):
        return _rounds(complete, others, held, save, lacking, size_bytes, storage)


class _Complete:
    """A controller to which all workers seem to have collected everything."""

    def __init__(self, controller: Any) -> None:
        self._controller, self.connections = controller, self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controller, name)

    def ask(self, requests: Mapping[str, Any]) -> dict[str, Any]:
        told = self._controller.connections.ask(requests)
        return {w: replace(m, missing=[]) for w, m in told.items()}


def _whole_or_not(snapshots: Any, needed: Any, limit: Any = None) -> Any:
    return _newest(snapshots, set(), limit)


def _memory_unheard(self: Any, workers: Sequence[str]) -> Any:
    recovery.in_memory(self._controller, workers)
    return self.on_disk(workers)


def _given_up_while_starting(self: Any, lost: WorkerLost) -> None:
    if not self._has_begun:
        raise lost
    _count_loss(self, lost)


def _never_forgetting(self: Any, lost: WorkerLost) -> None:
    self._losses = getattr(self, "_ever_lost", self._losses)
    _count_loss(self, lost)
    self._ever_lost = self._losses


def _anew_whatever_was_saved(self: Any, held: Any) -> None:
    self._controller.initialise(self._config.seed)


# --- checkpoints

_still_saved = recovery_decisions.still_saved
_savers, _save, _retain = Controller._savers, Controller.save, disk.outdated


def _idle_savers(self: Any) -> dict[str, schema.SavingState]:
    return {w: replace(m, busy=False) for w, m in _savers(self).items()}


def _saved_by(is_saved: Callable[[Any, Any], bool]) -> Callable[[Any], Any]:
    """Report how saving goes; `is_saved` judges the newest saves and the save."""

    def savers(self: Any) -> dict[str, schema.SavingState]:
        told = _savers(self)
        step, workers = self._saving
        save = step, self.attempts.get(step)
        have = [told[w].newest for w in workers if w in told]
        if workers and is_saved(have, save):
            self.saved = step
        return told

    return savers


def _saved_as_the_next(self: Any, storage: Any, step: int, *args: Any) -> bool:
    return _save(self, storage, step + 1, *args)


def _nothing_else_kept(steps: Any, complete: Any, keep: int, also: Any) -> list[int]:
    return _retain(steps, complete, keep, ())


def _only_the_last_kept(steps: Any, complete: Any, keep: int, also: Any) -> list[int]:
    return _retain(steps, complete, 1, ())


def _waiting_only(self: Any, step: int) -> None:
    self.driver.wait_saved()
    self.record()


def _leave_unplanned(self: Any, node: str) -> bool:
    return self._config.membership.leave(node)


def _fewer_only(self: Any, cluster: Any) -> bool:
    names = {node.name for node in self.cluster.nodes}
    return {node.name for node in cluster.nodes} < names


RECOVERY = (
    breaks(
        12,
        "a commit that only some have is dropped",
        function(_committed_step, lambda reached: (None, [])),
    ),
    breaks(
        12,
        "those one step behind are not given the commit",
        function(_committed_step, lambda reached: (_committed_step(reached)[0], [])),
    ),
    breaks(
        12,
        "all that are behind finish the step, however far",
        function(_committed_step, _all_behind_finish),
    ),
    breaks(
        12,
        "the commit of a step before the newest counts",
        function(_committed_step, _of_any_step),
    ),
    breaks(
        13,
        "what survivors have in memory is not asked for",
        method(SurvivingState, "held", _memory_unheard),
    ),
    breaks(
        14,
        "losses are counted across steps",
        method(Driver, "_count_loss", _never_forgetting),
    ),
    breaks(
        14,
        "a node that is lost again and again is not left out",
        method(recovered, "MOST_OF_A_NODE", 99),
    ),
    breaks(
        14,
        "no number of losses ends the run",
        method(recovered, "MOST_LOSSES", 9999),
    ),
    breaks(
        15,
        "the newest save is taken, whole or not",
        function(_newest, _whole_or_not),
    ),
    breaks(
        15,
        "leaves of different attempts go together",
        function(_restore, _in_one_attempt),
    ),
    breaks(
        15,
        "saves of steps that were given up are taken",
        function(_until, lambda most, held: [*held]),
    ),
    breaks(
        15,
        "the store is asked only if the workers have nothing",
        function(recovery_decisions._is_behind, lambda save, left: False),
    ),
    breaks(
        16,
        "all go on after a round, though something was damaged",
        function(_rounds, _one_round),
    ),
    breaks(
        16,
        "not all have their state in place when the run goes on",
        function(_restore, _placed_or_not),
    ),
    breaks(
        17,
        "a loss while the run starts ends it",
        method(Driver, "_count_loss", _given_up_while_starting),
    ),
    breaks(
        18,
        "a run begins anew though something was saved",
        method(Driver, "_begin_anew", _anew_whatever_was_saved),
    ),
    breaks(
        19,
        "a save begins while another is being written",
        method(Controller, "_savers", _idle_savers),
    ),
    breaks(
        22,
        "what a run has gone back from is there for the next start",
        method(Controller, "drop_state", _state_alone_dropped),
    ),
    breaks(
        19,
        "a state of another step is saved",
        method(Controller, "save", _saved_as_the_next),
    ),
    breaks(
        21,
        "a step is saved once one worker has its part",
        method(Controller, "_savers", _saved_by(lambda have, save: save in have)),
    ),
    breaks(
        21,
        "a step is saved whatever the attempts at it",
        method(
            Controller,
            "_savers",
            _saved_by(lambda have, save: {save[0]} == {h and h[0] for h in have}),
        ),
    ),
    breaks(
        21,
        "the newest that all have may go while another is written",
        function(_retain, _nothing_else_kept),
    ),
    breaks(
        21,
        "only the last that is written stays",
        function(_retain, _only_the_last_kept),
    ),
    breaks(
        21,
        "what is left of the saves after a loss may go while another is written",
        function(recovery_decisions.safe_save, lambda before, saved, restored: before),
    ),
    breaks(
        21,
        "who hung removes what a later start has saved",
        function(disk.is_overtaken, lambda attempts, own: False),
    ),
    breaks(
        22,
        "a checkpoint stays the newest though its disks are gone",
        function(_still_saved, lambda saved, restored, has_store: saved),
        function(recovery_decisions.is_kept, lambda saved, restored: True),
    ),
    breaks(
        23,
        "a run ends without saving its last step",
        method(Saving, "save_last", _waiting_only),
    ),
    breaks(
        24,
        "a node leaves before its state was handed over",
        function(_restore, _leaving_first),
    ),
    breaks(
        24,
        "what a node that leaves has in memory is not taken",
        function(_restore, _without_those_that_leave),
    ),
    breaks(
        24,
        "a node leaves whether or not the others can go on",
        method(Driver, "leave", _leave_unplanned),
    ),
    breaks(
        25,
        "a node that comes is not taken in",
        method(CurrentPlan, "_is_other", _fewer_only),
    ),
)
