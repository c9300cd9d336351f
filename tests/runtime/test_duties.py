# SPDX-License-Identifier: Apache-2.0
"""A worker's next action: one request after the other, none of an ended epoch."""

from dataclasses import replace

import pytest

from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.runtime.execution.commit import StepCommit
from hetjax.runtime.rpc.schema import (
    Abort,
    Build,
    Compile,
    Done,
    DropState,
    FinishStep,
    Initialise,
    Leave,
    LeaveOut,
    Lost,
    PlaceState,
    Request,
    TellReached,
    Train,
)
from hetjax.runtime.worker import duties
from hetjax.runtime.worker.duties import (
    Action,
    Answered,
    Begin,
    ControllerGone,
    Duties,
    End,
    Event,
    OutOfOrder,
    Progress,
    Reply,
    Requested,
    begun,
    committed,
    done,
    rerouted,
)

TRAIN = Train(step=4, turn=0, traced=False)
COMMIT = StepCommit(squares=1.0, losses=(), num_tokens=8)
NOWHERE = CheckpointStorage(directory="/nowhere")


def after(*events: Event) -> list[Action]:
    """Return all actions on these events, in order."""
    state, found = Duties(), []
    for event in events:
        state, actions = duties.react(event, state)
        found += actions
    return found


def test_requests_are_begun_one_after_the_other_and_answered_as_they_were_asked():
    asked = Compile(epoch=1), TellReached(epoch=1)
    assert after(Requested(7, asked[0]), Requested(8, asked[1])) == [Begin(7, asked[0])]
    assert after(Requested(7, asked[0]), Requested(8, asked[1]), Answered(Done())) == [
        Begin(7, asked[0]),
        Reply(7, Done(epoch=1)),
        Begin(8, asked[1]),
    ]
    waiting = [Requested(number, asked[1]) for number in (8, 9, 10)]
    found = after(Requested(7, asked[0]), *waiting, Answered(Done()))
    assert found[-1] == Begin(8, asked[1])


def test_an_abort_waits_for_nothing_and_is_not_answered():
    breaking = Abort(worker="b", reason="left", epoch=1)
    lost = Lost(worker="b", reason="left")
    assert after(Requested(7, TRAIN), Requested(7, breaking), Answered(lost)) == [
        Begin(7, TRAIN),
        duties.AbortDuty(breaking),
        Reply(7, Lost(worker="b", reason="left", epoch=0)),
    ]


def test_no_request_of_an_epoch_that_is_over_is_begun():
    for later in (1, 2, 2):
        assert after(Requested(1, Compile(epoch=1)), Requested(2, Compile(epoch=later)))
    found = after(Requested(1, Compile(epoch=2)), Requested(2, Compile(epoch=1)))
    assert found == [Begin(1, Compile(epoch=2)), End("sent epoch 1 after epoch 2")]


def test_it_ends_after_the_answer_to_leave_or_with_its_controller_and_does_no_more():
    leaving = Requested(1, Leave()), Answered(Done()), ControllerGone("left")
    assert after(*leaving)[1:] == [Reply(1, Done()), End()]
    gone = Requested(1, TRAIN), ControllerGone("left"), Answered(Done())
    assert after(*gone, Requested(2, Compile()))[1:] == [End("left")]


@pytest.mark.parametrize(
    ("progress", "request_"),
    [
        (Progress(), FinishStep(commit=COMMIT)),
        (Progress(at=4, commit=COMMIT), FinishStep(commit=COMMIT)),
    ],
)
def test_what_does_not_follow_from_the_state_is_not_begun(
    progress: Progress, request_: Request
):
    with pytest.raises(OutOfOrder):
        begun(progress, request_)


def test_an_aborted_step_leaves_the_state_as_it_was_and_can_be_finished():
    broken = begun(Progress(at=4, commit=COMMIT), TRAIN)
    assert broken == Progress(at=4, commit=None)
    finishing = FinishStep(commit=COMMIT)
    assert done(begun(broken, finishing), finishing) == committed(4, COMMIT)


def test_a_step_that_others_have_left_out_is_finished_although_none_was_aborted():
    left_out = replace(COMMIT, is_left_out=True)
    before, late = Progress(at=4, commit=COMMIT), FinishStep(commit=left_out)
    asked = LeaveOut(step=4, commit=left_out)
    assert done(begun(before, late), late) == committed(4, left_out)
    assert done(begun(before, asked), asked) == committed(4, left_out)
    again = committed(4, left_out)  # repeated after a loss
    assert done(begun(again, asked), asked) == again
    assert done(before, DropState(kept=3, storage=NOWHERE)) == Progress()


def test_who_takes_samples_over_has_its_state_unless_a_stage_was_left_behind():
    before = Progress(at=4, commit=COMMIT)
    assert rerouted(before, False) == Progress(at=4)
    assert rerouted(before, True) == Progress()


def test_the_state_is_gone_with_its_stages_and_there_once_it_is_made_or_placed():
    assert begun(Progress(at=4, commit=COMMIT), Build(settings={})) == Progress()
    assert done(Progress(), Initialise(seed=1)) == Progress(at=0)
    placed = PlaceState(step=4)
    assert done(Progress(at=6, commit=COMMIT), placed) == Progress(at=4)
    assert done(Progress(at=4, commit=COMMIT), placed) == Progress(at=4, commit=COMMIT)
