# SPDX-License-Identifier: Apache-2.0
"""What a worker does next, and how far its state is: no I/O.

Requests are answered one after the other, in the order in which they come; breaking off
alone cannot wait. Owns this order, the epochs, which request may be begun on which
state, and what each makes of it. Pure: `react` gives the next state and what to do.
Does not own doing it (`service.py`), threads and the connection (`serving.py`), nor the
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
    """What was begun is done, or came to nothing."""

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
class BreakOffDuty:
    """Let what is being done wait no longer for another worker."""

    request: schema.BreakOff


@dataclass(frozen=True, slots=True)
class Reply:
    number: int
    message: Message


@dataclass(frozen=True, slots=True)
class End:
    """End the process: nobody is left to work for, or all is done if `reason` is ""."""

    reason: str = ""


Action: TypeAlias = Begin | BreakOffDuty | Reply | End

# --- state


@dataclass(frozen=True, slots=True)
class Duties:
    """What a worker has to do: `doing` now, `waiting` after that."""

    epoch: int = 0
    doing: tuple[int, AnyRequest] | None = None
    waiting: tuple[tuple[int, AnyRequest], ...] = ()
    has_ended: bool = False


Reaction = tuple[Duties, tuple[Action, ...]]


@singledispatch
def react(event: Event, state: Duties) -> Reaction:
    """The state after an event, and what is to be done, in this order."""
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
    if isinstance(request, schema.BreakOff):
        return state, (BreakOffDuty(request),)
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
    """Begin what has waited longest, unless something is being done."""
    if state.doing is not None or not state.waiting:
        return state, ()
    (number, request), *others = state.waiting
    state = replace(state, doing=(number, request), waiting=tuple(others))
    return state, (Begin(number, request),)


# --- how far the state is


class OutOfOrder(Exception):
    """The request does not follow from the state."""


@dataclass(frozen=True, slots=True)
class Progress:
    """`at` steps are behind the state, None: it has none; `commit` is of the last one.

    That is there if it was done here, and not restored.
    """

    at: int | None = None
    commit: StepCommit | None = None


def begun(progress: Progress, request: AnyRequest) -> Progress:
    """How far the state is once the request is begun; raises OutOfOrder."""
    at = progress.at
    if isinstance(request, schema.FinishStep) and not _can_finish(progress, request):
        raise OutOfOrder(f"asked to finish a step after step {at}, and has broken none")
    if isinstance(request, schema.Train):
        return replace(progress, commit=None)
    if isinstance(request, schema.Build):
        return Progress()
    return progress


def _can_finish(progress: Progress, request: schema.FinishStep) -> bool:
    """Whether a step was broken off, or is one to leave out, which is never begun."""
    if progress.at is None:
        return False
    return progress.commit is None or request.commit.is_left_out


def done(progress: Progress, request: AnyRequest) -> Progress:
    """How far the state is after a request that was begun, and came to its end."""
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
    """How far the state is once a step of training is committed here."""
    return Progress(at=step + 1, commit=commit)


def rerouted(progress: Progress, is_behind: bool) -> Progress:
    """How far the state is once other stages take part, some of which may be behind.

    What a broken step has come to is dropped, and nobody finishes it any more.
    """
    return Progress(at=None if is_behind else progress.at)
