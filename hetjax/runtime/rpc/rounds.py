# SPDX-License-Identifier: Apache-2.0
"""Tracks a controller's workers, and the round that it waits for: no I/O.

A round sends several workers the same kind of request at once. It is over when all of
them have answered or are lost: then no other worker is busy with it any more, and the
survivors' state is known. Owns which workers are there (only the newest connection of
each counts), which answers count, the time limits, and when to abort the other workers.
Pure: `react` returns the next state and the actions. Does not own connections or clocks
(`worker_connections.py`), the messages (`schema.py`), nor what is requested when
(`runtime/control/`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import singledispatch
from typing import TypeAlias

from hetjax.runtime.rpc import schema
from hetjax.runtime.rpc.limits import WATCHDOG_FACTOR, first_step_s, limit_s
from hetjax.runtime.rpc.message import LIMITS, AnyRequest, Message, answer_of

Trouble = tuple[str, str]  # lost worker, reason

# --- events


@dataclass(frozen=True, slots=True)
class Spawned:
    """A worker is being started; its earlier starts no longer count."""

    worker: str
    start: int


@dataclass(frozen=True, slots=True)
class Called:
    """A worker has called and proven who it is; a later `connection` is greater.

    `start` is the number of its start, by which its launcher knows it.
    """

    worker: str
    connection: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """This connection of a worker has ended."""

    worker: str
    connection: int
    reason: str


@dataclass(frozen=True, slots=True)
class Heard:
    """This connection of a worker answers request `number`, or reports its progress."""

    worker: str
    connection: int
    number: int
    message: Message


@dataclass(frozen=True, slots=True)
class Asked:
    """The run requests something of these workers; the previous round is given up."""

    requests: Mapping[str, AnyRequest]


@dataclass(frozen=True, slots=True)
class TakenForLost:
    """A worker is lost, whatever its connection says."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing has happened, but a limit may have passed."""


Event: TypeAlias = Spawned | Called | Ended | Heard | Asked | TakenForLost | TimePassed

# --- actions


@dataclass(frozen=True, slots=True)
class Send:
    worker: str
    connection: int
    number: int
    request: AnyRequest


@dataclass(frozen=True, slots=True)
class Close:
    """End this connection of a worker."""

    worker: str
    connection: int


@dataclass(frozen=True, slots=True)
class ReportProgress:
    """A worker reports the progress of its part of the round."""

    worker: str
    message: schema.Compiling


@dataclass(frozen=True, slots=True)
class Finish:
    """The round is over: its answers, and the worker that was lost in it, if any."""

    replies: Mapping[str, Message]
    trouble: Trouble | None


Action: TypeAlias = Send | Close | ReportProgress | Finish

# --- state


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """The requests of a round, each worker's connection, and the results so far.

    `broken_by` is why the others were told to abort, once they were.
    """

    asked: Mapping[str, AnyRequest]
    connections: Mapping[str, int]
    begin_s: float
    limit_s: float
    end_s: float
    replies: Mapping[str, Message] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    broken_by: Trouble | None = None

    @property
    def late(self) -> list[str]:
        """Workers that have neither answered nor been lost."""
        return [w for w in self.asked if w not in self.replies and w not in self.lost]

    @property
    def what(self) -> type[AnyRequest]:
        return type(next(iter(self.asked.values())))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """The workers of a run, by the newest start of each, and the current round.

    Limits (`limits.py`) are multiplied by `timeout_scale`. `longest_s` has the longest
    time so far by kind of request, for kinds that take about as long each time.
    """

    timeout_scale: float = 1.0
    watchdog_factor: float = WATCHDOG_FACTOR
    longest_s: Mapping[type[AnyRequest], float] = field(default_factory=dict)
    number: int = 0  # of the latest round
    there: Mapping[str, int] = field(default_factory=dict)
    newest: Mapping[str, int] = field(default_factory=dict)
    started: Mapping[str, int] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    round: Round | None = None

    def limit_s(
        self, what: type[AnyRequest] | str, expected_s: float | None = None
    ) -> float:
        """Return how long a worker may take for this kind of request."""
        longest_s = None if isinstance(what, str) else self.longest_s.get(what)
        if what is schema.Train and expected_s is not None:
            expected_s = first_step_s(expected_s, self.longest_s)
        found_s = limit_s(what, expected_s, longest_s, self.watchdog_factor)
        return self.timeout_scale * found_s


# kinds that take about as long each time; Compile varies, which LEAST_COMPILE_S
# allows for
_STEADY = (schema.Train, schema.Evaluate, schema.Compile)
Reaction = tuple[Rounds, tuple[Action, ...]]


@singledispatch
def react(event: Event, state: Rounds, now_s: float) -> Reaction:
    """Return the state after an event, and the actions to do, in this order.

    `now_s` is of a clock that never goes back.
    """
    raise TypeError(event)


@react.register
def _started(event: Spawned, state: Rounds, now_s: float) -> Reaction:
    started = {**state.started, event.worker: event.start}
    state = replace(state, started=started)
    if event.worker not in state.there:
        return state, ()
    return _lose(state, {event.worker: "was started again"}, now_s)


@react.register
def _called(event: Called, state: Rounds, now_s: float) -> Reaction:
    worker, connection = event.worker, event.connection
    is_newest = connection > state.newest.get(worker, -1)
    if not is_newest or event.start < state.started.get(worker, 0):
        return state, (Close(worker, connection),)  # an earlier start, of no more use
    earlier = state.there.get(worker)
    if earlier is not None:
        state = _without(state, worker, "was started again")
    state = replace(
        state,
        there={**state.there, worker: connection},
        newest={**state.newest, worker: connection},
        lost={name: why for name, why in state.lost.items() if name != worker},
    )
    after, actions = _see_to_round(state, now_s)
    closing = () if earlier is None else (Close(worker, earlier),)
    return after, (*closing, *actions)


@react.register
def _ended(event: Ended, state: Rounds, now_s: float) -> Reaction:
    if state.there.get(event.worker) != event.connection:
        return state, ()  # an earlier start, already replaced or given up
    return _see_to_round(_without(state, event.worker, event.reason), now_s)


@react.register
def _taken_for_lost(event: TakenForLost, state: Rounds, now_s: float) -> Reaction:
    return _lose(state, {event.worker: event.reason}, now_s)


@react.register
def _received(event: Heard, state: Rounds, now_s: float) -> Reaction:
    if state.there.get(event.worker) != event.connection:
        return state, ()
    if event.number < state.number:
        return state, ()  # the answer is no longer awaited
    found, worker = state.round, event.worker
    asked = None
    if found is not None and event.number == state.number and worker in found.late:
        asked = found.asked[worker]
    if wrong := _refusal(event.message, asked):
        reason = f"sent an unreadable message (BadMessage: {wrong})"
        return _lose(state, {worker: reason}, now_s)
    assert found is not None
    if isinstance(event.message, schema.Compiling):
        # a limit for each program, within the table's limit for all
        most_s = state.timeout_scale * LIMITS[schema.Compile].seconds
        end_s = min(found.begin_s + most_s, now_s + found.limit_s)
        found = replace(found, end_s=max(found.end_s, end_s))
        return replace(state, round=found), (ReportProgress(worker, event.message),)
    replies = {**found.replies, worker: event.message}
    return _see_to_round(replace(state, round=replace(found, replies=replies)), now_s)


@react.register
def _asked(event: Asked, state: Rounds, now_s: float) -> Reaction:
    number, requests = state.number + 1, event.requests
    there = {w: state.there[w] for w in requests if w in state.there}
    (what,) = {type(request) for request in requests.values()}
    (expected_s,) = {request.expected_s for request in requests.values()}
    most_s = state.limit_s(what, expected_s)
    found = Round(
        asked=requests,
        connections=there,
        begin_s=now_s,
        limit_s=most_s,
        end_s=now_s + most_s,
        lost={w: state.lost.get(w, _NEVER) for w in requests if w not in there},
    )
    sending = [Send(w, there[w], number, requests[w]) for w in there]
    after, actions = _see_to_round(replace(state, number=number, round=found), now_s)
    return after, (*sending, *actions)


@react.register
def _time_passed(event: TimePassed, state: Rounds, now_s: float) -> Reaction:
    return _see_to_round(state, now_s)


_NEVER = "has not connected"


def _see_to_round(state: Rounds, now_s: float) -> Reaction:
    """End the round if no worker is late; abort it past its limit, or after a loss.

    A worker that answers after the abort was only waiting for the lost one; a worker
    that does not answer within the new limit is lost, too.
    """
    found = state.round
    if found is None:
        return state, ()
    late, trouble = found.late, trouble_of(found.replies, found.lost)
    if not late:
        return _finished(state, found, now_s)
    is_over = now_s > found.end_s
    passed = LIMITS[found.what].passed(found.limit_s)
    if found.broken_by is not None:
        return (
            _lose(state, dict.fromkeys(late, passed), now_s) if is_over else (state, ())
        )
    if is_over:
        trouble = trouble or (late[0], passed)
    if trouble is None:
        return state, ()
    end_s = max(found.end_s, now_s + state.limit_s(schema.Abort))
    broken = replace(found, broken_by=trouble, end_s=end_s)
    return replace(state, round=broken), _aborting(state.number, broken, is_over)


def _aborting(number: int, found: Round, is_late: bool) -> tuple[Action, ...]:
    assert found.broken_by is not None
    worker, reason = found.broken_by
    return tuple(
        Send(
            late,
            found.connections[late],
            number,
            schema.Abort(
                worker=worker,
                reason=reason,
                epoch=found.asked[late].epoch,
                is_late=is_late,
            ),
        )
        for late in found.late
    )


def _finished(state: Rounds, found: Round, now_s: float) -> Reaction:
    trouble = trouble_of(found.replies, found.lost) or found.broken_by
    longest_s = dict(state.longest_s)
    if trouble is None and found.what in _STEADY:
        took_s = now_s - found.begin_s
        longest_s[found.what] = max(longest_s.get(found.what, 0.0), took_s)
    after = replace(state, round=None, longest_s=longest_s)
    return after, (Finish(found.replies, trouble),)


def _lose(state: Rounds, reasons: Mapping[str, str], now_s: float) -> Reaction:
    """Count workers as lost, and end their connections."""
    closing = [Close(w, state.there[w]) for w in reasons if w in state.there]
    for worker, reason in reasons.items():
        state = _without(state, worker, reason)
    after, actions = _see_to_round(state, now_s)
    return after, (*closing, *actions)


def _without(state: Rounds, worker: str, reason: str) -> Rounds:
    """Return the state without this start of the worker, also in the current round."""
    there = {name: at for name, at in state.there.items() if name != worker}
    lost = {worker: reason, **state.lost}  # the first known reason stays
    found = state.round
    if found is not None and worker in found.late:
        found = replace(found, lost={**found.lost, worker: lost[worker]})
    return replace(state, there=there, lost=lost, round=found)


def _refusal(message: Message, asked: AnyRequest | None) -> str | None:
    """Return why a message does not answer the worker's request; None if it does."""
    name = type(message).__name__
    if asked is None:
        return f"{name} answers no open request"
    if message.epoch != asked.epoch:
        return f"{name} has epoch {message.epoch}, not {asked.epoch}"
    if isinstance(message, (answer_of(type(asked)), *_EXCUSES)):
        return None
    if isinstance(message, schema.Compiling) and isinstance(asked, schema.Compile):
        return None
    return f"{name} does not answer {type(asked).__name__}"


_EXCUSES = schema.Lost, schema.RequestRefused, schema.RequestFailed


def trouble_of(
    replies: Mapping[str, Message], lost: Mapping[str, str]
) -> Trouble | None:
    """Return which worker is lost or failed, and how: first-hand news before hearsay.

    A lost worker may have made others fail.
    """
    for worker, reason in lost.items():
        return worker, reason
    for worker, message in replies.items():
        if isinstance(message, schema.RequestFailed):
            return worker, f"failed: {message.error}"
        if isinstance(message, schema.RequestRefused):
            return worker, "failed: bad input"
    for message in replies.values():
        if isinstance(message, schema.Lost):
            return message.worker, message.reason
    return None
