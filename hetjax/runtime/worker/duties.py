# SPDX-License-Identifier: Apache-2.0
"""Decides what a worker does next, and how far its state is: no I/O.

Requests are answered one after the other, in the order of arrival; only an abort cannot
wait. Owns this order, the epochs, which request may be started on which state, and its
effect on the state. Pure: `react` returns the next state and the actions. Does not own
the actions' effects (`service.py`), threads and the connection (`server.py`), nor the
controller's side (`hetjax/runtime/rpc/rounds.py`).
"""

from dataclasses import dataclass, replace
from functools import singledispatch
from typing import TypeAlias

from hetjax.runtime.execution.commit import StepCommit
from hetjax.runtime.rpc import schema
from hetjax.runtime.rpc.message import AnyRequest
from hetjax.runtime.rpc.schema import Message

# --- events


@dataclass(frozen=True, slots=True)
class Requested:
    number: int
    request: AnyRequest


@dataclass(frozen=True, slots=True)
class Answered:
    """The current request is done, or has failed."""

    message: Message


@dataclass(frozen=True, slots=True)
class ControllerGone:
    reason: str


Event: TypeAlias = Requested | Answered | ControllerGone

# --- actions


@dataclass(frozen=True, slots=True)
class Begin:
    number: int
    request: AnyRequest


@dataclass(frozen=True, slots=True)
class AbortDuty:
    """Stop the current request from waiting for another worker."""

    request: schema.Abort


@dataclass(frozen=True, slots=True)
class Reply:
    number: int
    message: Message


@dataclass(frozen=True, slots=True)
class End:
    """End the process: no controller is left, or all is done if `reason` is ""."""

    reason: str = ""


Action: TypeAlias = Begin | AbortDuty | Reply | End

# --- state


@dataclass(frozen=True, slots=True)
class Duties:
    """The requests of a worker: `doing` now, `waiting` after that."""

    epoch: int = 0
    doing: tuple[int, AnyRequest] | None = None
    waiting: tuple[tuple[int, AnyRequest], ...] = ()
    has_ended: bool = False


Reaction = tuple[Duties, tuple[Action, ...]]


@singledispatch
def react(event: Event, state: Duties) -> Reaction:
    """Return the state after an event, and the actions to do, in this order."""
    raise TypeError(event)


@react.register
def _requested(event: Requested, state: Duties) -> Reaction:
    number, request = event.number, event.request
    if state.has_ended:
        return state, ()
    if request.epoch < state.epoch:
        reason = f"sent epoch {request.epoch} after epoch {state.epoch}"
        return _ended(state, reason)
    state = replace(state, epoch=request.epoch)
    if isinstance(request, schema.Abort):
        return state, (AbortDuty(request),)
    waiting = (*state.waiting, (number, request))
    return _next(replace(state, waiting=waiting))


@react.register
def _answered(event: Answered, state: Duties) -> Reaction:
    if state.has_ended:
        return state, ()
    assert state.doing is not None
    number, request = state.doing
    reply = Reply(number, replace(event.message, epoch=request.epoch))
    state = replace(state, doing=None)
    if isinstance(request, schema.Leave):
        state, ending = _ended(state)
        return state, (reply, *ending)
    state, beginning = _next(state)
    return state, (reply, *beginning)


@react.register
def _controller_gone(event: ControllerGone, state: Duties) -> Reaction:
    return (state, ()) if state.has_ended else _ended(state, event.reason)


def _ended(state: Duties, reason: str = "") -> Reaction:
    return replace(state, has_ended=True, waiting=()), (End(reason),)


def _next(state: Duties) -> Reaction:
    """Start the request that has waited longest, unless one is being done."""
    if state.doing is not None or not state.waiting:
        return state, ()
    (number, request), *others = state.waiting
    state = replace(state, doing=(number, request), waiting=tuple(others))
    return state, (Begin(number, request),)


# --- how far the state is


class OutOfOrder(Exception):
    """The request does not fit the state."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How many steps the state was trained for (None: no state); the last commit.

    `commit` is set only if this worker committed step `at` itself: not if it restored
    that state.
    """

    at: int | None = None
    commit: StepCommit | None = None


def begun(progress: Progress, request: AnyRequest) -> Progress:
    """Return how far the state is once the request has started; raise OutOfOrder."""
    at = progress.at
    if isinstance(request, schema.FinishStep) and not _can_finish(progress, request):
        raise OutOfOrder(
            f"asked to finish a step after step {at}, but has aborted none"
        )
    if isinstance(request, schema.Train):
        return replace(progress, commit=None)
    if isinstance(request, schema.Build):
        return Progress()
    return progress


def _can_finish(progress: Progress, request: schema.FinishStep) -> bool:
    """Return whether a step was aborted, or is left out and so was never started."""
    if progress.at is None:
        return False
    return progress.commit is None or request.commit.is_left_out


def done(progress: Progress, request: AnyRequest) -> Progress:
    """Return how far the state is after a request that has started and succeeded."""
    match request:
        case schema.Initialise():
            return Progress(at=0)
        case schema.DropState():
            return Progress()
        case schema.LeaveOut() if progress.at == request.step:
            return Progress(at=request.step + 1, commit=request.commit)
        case schema.FinishStep():
            assert progress.at is not None
            return Progress(at=progress.at + 1, commit=request.commit)
        case schema.PlaceState() if progress.at != request.step:
            return Progress(at=request.step)
    return progress


def committed(step: int, commit: StepCommit) -> Progress:
    """Return how far the state is once a step of training is committed here."""
    return Progress(at=step + 1, commit=commit)


def rerouted(progress: Progress, is_behind: bool) -> Progress:
    """Return how far the state is once other stages take part; some may be behind.

    The results of an aborted step are discarded, and it is never finished.
    """
    return Progress(at=None if is_behind else progress.at)
