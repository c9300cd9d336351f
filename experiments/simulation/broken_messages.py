# SPDX-License-Identifier: Apache-2.0
"""Breaks rules of rounds, starts, epochs and steps: 1 to 11 of the protocol.

Owns these mutations; each leaves out one check of the product. They follow from the
text of `docs/how/protocol.md` and do not depend on the simulation. Does not own their
installation (`breaking.py`), the other rules (`broken_recovery.py`), nor the search for
them (`mutations.py`).
"""

from dataclasses import replace
from typing import Any

from experiments.simulation.breaking import breaks, events, function, handler, method
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.rpc import rounds, schema
from hetjax.runtime.rpc.message import LIMITS
from hetjax.runtime.worker import duties

_see_to_round = rounds._see_to_round
_called = rounds.react.registry[rounds.Called]


def _over_at_a_loss(state: rounds.Rounds, now_s: float) -> rounds.Reaction:
    found = state.round
    trouble = found and rounds.trouble_of(found.replies, found.lost)
    if found is None or trouble is None or not found.late:
        return _see_to_round(state, now_s)
    found = replace(found, broken_by=trouble)
    after, finish = rounds._finished(state, found, now_s)
    return after, (*rounds._aborting(state.number, found, False), *finish)


def _patient_with_the_broken(state: rounds.Rounds, now_s: float) -> rounds.Reaction:
    found = state.round
    if found is not None and found.broken_by is not None and found.late:
        return state, ()
    return _see_to_round(state, now_s)


def _longest_alone(
    what: Any, predicted_s: Any, longest_s: float | None, factor: float
) -> float:
    most_s = LIMITS[what].seconds
    return most_s if longest_s is None else min(most_s, longest_s)


def _told_first(replies: Any, lost: Any) -> rounds.Trouble | None:
    for message in replies.values():
        if isinstance(message, schema.Lost):
            return message.worker, message.reason
    return _trouble_of(replies, lost)


def _failures_pass(replies: Any, lost: Any) -> rounds.Trouble | None:
    failed = schema.RequestFailed, schema.RequestRefused
    left = {w: m for w, m in replies.items() if not isinstance(m, failed)}
    return _trouble_of(left, lost)


def _any_called(event: Any, state: Any, now_s: float) -> rounds.Reaction:
    return _called(event, replace(state, newest={}), now_s)


def _lose_without_closing(state: Any, reasons: Any, now_s: float) -> rounds.Reaction:
    after, actions = _lose(state, reasons, now_s)
    return after, tuple(a for a in actions if not isinstance(a, rounds.Close))


def _of_any_epoch(message: Any, asked: Any) -> str | None:
    return _refusal(asked and replace(message, epoch=asked.epoch), asked)


def _of_any_kind(message: Any, asked: Any) -> str | None:
    return _refusal(schema.RequestFailed(error="", epoch=message.epoch), asked)


_trouble_of, _lose, _refusal = rounds.trouble_of, rounds._lose, rounds._refusal


# --- duties

_connect, _next = Controller.connect, duties._next
_requested = duties.react.registry[duties.Requested]
_begun = duties.begun


def _connect_as_before(self: Any, *args: Any, **kwargs: Any) -> None:
    self.connections.epoch = max(0, self.connections.epoch - 1)
    _connect(self, *args, **kwargs)


def _of_earlier_epochs(event: Any, state: Any) -> duties.Reaction:
    epoch = min(state.epoch, event.request.epoch)
    after, actions = _requested(event, replace(state, epoch=epoch))
    return replace(after, epoch=max(after.epoch, state.epoch)), actions


def _queueing_all(event: Any, state: Any) -> duties.Reaction:
    is_break = isinstance(event.request, schema.Abort)
    if not is_break or state.doing is None or state.has_ended:
        return _requested(event, state)
    return replace(state, waiting=(*state.waiting, (event.number, event.request))), ()


def _next_with_breaks(state: Any) -> duties.Reaction:
    if state.doing is not None or not state.waiting:
        return state, ()
    (_, request), *others = state.waiting
    if not isinstance(request, schema.Abort):
        return _next(state)
    after, actions = _next_with_breaks(replace(state, waiting=tuple(others)))
    return after, (duties.AbortDuty(request), *actions)


def _last_first(state: Any) -> duties.Reaction:
    return _next(replace(state, waiting=state.waiting[::-1]))


def _commit_kept(progress: Any, request: Any) -> Any:
    after = _begun(progress, request)
    is_train = isinstance(request, schema.Train)
    return replace(after, commit=progress.commit) if is_train else after


MESSAGES = (
    breaks(
        1,
        "a round is over with the first loss, while others are busy",
        function(_see_to_round, _over_at_a_loss),
    ),
    breaks(
        2,
        "the answer to an earlier round is taken for this one's",
        events(
            rounds.react,
            rounds.Heard,
            lambda heard, state: replace(heard, number=max(heard.number, state.number)),
        ),
    ),
    breaks(
        2, "the epoch of an answer is not looked at", function(_refusal, _of_any_epoch)
    ),
    breaks(
        2, "the kind of an answer is not looked at", function(_refusal, _of_any_kind)
    ),
    breaks(
        3,
        "what was told comes before what was seen",
        function(_trouble_of, _told_first),
    ),
    breaks(3, "one that fails is not lost", function(_trouble_of, _failures_pass)),
    breaks(
        4,
        "the others are not told to abort",
        function(rounds._aborting, lambda number, found, is_late: ()),
    ),
    breaks(
        5,
        "requests have no limit",
        events(rounds.react, rounds.TimePassed, lambda event, state: None),
    ),
    breaks(
        5,
        "an abort has no limit",
        function(_see_to_round, _patient_with_the_broken),
    ),
    breaks(
        5,
        "the connection of one that is lost is left open",
        function(_lose, _lose_without_closing),
    ),
    breaks(
        6,
        "the limit is the longest so far, not ten times that",
        method(rounds, "limit_s", _longest_alone),
    ),
    breaks(
        7,
        "an older start that calls takes the place of the newer",
        handler(rounds.react, rounds.Called, _any_called),
    ),
    breaks(
        7,
        "the answer of an older start counts",
        events(
            rounds.react,
            rounds.Heard,
            lambda heard, state: replace(
                heard, connection=state.there.get(heard.worker, heard.connection)
            ),
        ),
    ),
    breaks(
        7,
        "the end of an older connection loses the newer start",
        events(
            rounds.react,
            rounds.Ended,
            lambda ended, state: replace(
                ended, connection=state.there.get(ended.worker, ended.connection)
            ),
        ),
    ),
    breaks(
        8,
        "the epoch does not grow",
        method(Controller, "connect", _connect_as_before),
    ),
    breaks(
        8,
        "a worker does what is asked of an earlier epoch",
        handler(duties.react, duties.Requested, _of_earlier_epochs),
    ),
    breaks(
        8,
        "a worker whose controller is gone stays",
        events(duties.react, duties.ControllerGone, lambda event, state: None),
    ),
    breaks(
        9,
        "an abort waits for its turn",
        handler(duties.react, duties.Requested, _queueing_all),
        function(_next, _next_with_breaks),
    ),
    breaks(9, "what was asked last is done first", function(_next, _last_first)),
    breaks(
        11,
        "an aborted step keeps the commit of the one before",
        function(_begun, _commit_kept),
    ),
)
