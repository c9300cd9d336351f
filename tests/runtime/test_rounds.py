# SPDX-License-Identifier: Apache-2.0
"""When a round ends, which answers count, and which workers are told to abort."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hetjax.runtime.execution.commit import StepCommit
from hetjax.runtime.rpc import rounds
from hetjax.runtime.rpc.limits import LEAST_COMPILE_S, LEAST_S
from hetjax.runtime.rpc.message import LIMITS
from hetjax.runtime.rpc.rounds import (
    Action,
    Asked,
    Called,
    Close,
    Ended,
    Event,
    Finish,
    Heard,
    Rounds,
    Send,
    Spawned,
    TakenForLost,
    TimePassed,
)
from hetjax.runtime.rpc.schema import (
    Abort,
    AwaitSaved,
    Compile,
    Compiling,
    Done,
    Lost,
    Message,
    Reached,
    RequestFailed,
    TellReached,
    Train,
    Trained,
)

NAMES = "abc"
COMPILE = Compile(epoch=1)
DONE = Done(epoch=1)
COMMIT = StepCommit(squares=1.0, losses=(), num_tokens=8)
TRAIN = Train(step=0, turn=0, traced=False)


def after(
    *events: Event | float, state: Rounds | None = None
) -> tuple[Rounds, list[Action]]:
    """Return the state and all actions after events; a number lets seconds pass."""
    found, actions, now_s = state or Rounds(), list[Action](), 0.0
    for event in events:
        if isinstance(event, (int, float)):
            now_s += event
            event = TimePassed()
        found, more = rounds.react(event, found, now_s)
        actions += more
    return found, actions


def asked(*names: str) -> list[Event]:
    """Return the events of round 1: these workers have called and get a request."""
    return [*(Called(name, 1) for name in names), Asked(dict.fromkeys(names, COMPILE))]


def ends(actions: Sequence[Action]) -> list[Finish]:
    return [action for action in actions if isinstance(action, Finish)]


def told_to_abort(actions: Sequence[Action]) -> list[str]:
    return [
        action.worker
        for action in actions
        if isinstance(action, Send) and isinstance(action.request, Abort)
    ]


def test_a_round_is_over_when_all_have_answered():
    answers = [Heard(name, 1, 1, DONE) for name in NAMES]
    _, actions = after(*asked(*NAMES), *answers[:2])
    assert not ends(actions)
    _, actions = after(*asked(*NAMES), *answers)
    assert ends(actions) == [Finish(dict.fromkeys(NAMES, DONE), None)]


def test_a_loss_breaks_off_the_others_once_and_ends_when_they_have_answered():
    lost = Ended("b", 1, "left"), Ended("b", 1, "left")
    _, actions = after(*asked(*NAMES), Heard("a", 1, 1, DONE), *lost, 1.0, 1.0)
    assert told_to_abort(actions) == ["c"] and not ends(actions)
    told = Lost(worker="b", reason="left", epoch=1)
    events = *asked(*NAMES), Heard("a", 1, 1, DONE), *lost, Heard("c", 1, 1, told)
    assert ends(after(*events)[1]) == [Finish({"a": DONE, "c": told}, ("b", "left"))]


def test_what_was_seen_comes_before_what_was_told():
    hearsay = Lost(worker="b", reason="gave no sign of life", epoch=1)
    failed = RequestFailed(error="no room", epoch=1)
    events = Heard("a", 1, 1, hearsay), Heard("c", 1, 1, failed), Heard("b", 1, 1, DONE)
    (found,) = ends(after(*asked(*NAMES), *events)[1])
    assert found.trouble == ("c", "failed: no room")


def test_past_the_limit_the_late_are_told_and_past_that_of_an_abort_they_are_lost():
    limit_s, more_s = LIMITS[Compile].seconds, LIMITS[Abort].seconds
    events = *asked("a", "b"), Heard("a", 1, 1, DONE), limit_s, 1.0
    state, actions = after(*events)
    assert told_to_abort(actions) == ["b"] and "b" in state.there
    _, actions = after(*events, more_s - 0.5)
    assert not ends(actions)
    state, actions = after(*events, more_s, 1.0)
    assert Close("b", 1) in actions and [*state.there] == ["a"]
    (found,) = ends(actions)
    assert found.trouble is not None and found.trouble[0] == "b"
    assert found.trouble[1].startswith("took more than 7200 s to compile its stages")


def test_an_older_start_is_turned_away_and_its_end_is_no_loss_of_the_newer():
    events: list[Event] = [Called("a", 2), Called("a", 1), Ended("a", 1, "left")]
    state, actions = after(*events)
    assert actions == [Close("a", 1)] and state.there == {"a": 2} and not state.lost
    answer = Heard("a", 1, 1, DONE)
    _, actions = after(*events, Asked({"a": COMPILE}), answer)
    assert not ends(actions)


def test_a_newer_start_loses_the_older_in_the_round_that_it_was_asked_in():
    state, actions = after(*asked("a", "b"), Called("a", 2), Heard("b", 1, 1, DONE))
    assert Close("a", 1) in actions and state.there == {"a": 2, "b": 1}
    assert ends(actions)[0].trouble == ("a", "was started again")
    again = after(Asked({"a": COMPILE}), Heard("a", 2, 2, DONE), state=state)
    assert ends(again[1]) == [Finish({"a": DONE}, None)]


def test_of_two_starts_under_way_only_the_one_that_was_started_last_is_let_in():
    events = (
        Spawned("a", 7),
        Spawned("a", 8),
        Called("a", 1, 7),
        Called("a", 2, 8),
    )
    state, actions = after(*events)
    assert actions == [Close("a", 1)] and state.there == {"a": 2}
    state, actions = after(*events, Spawned("a", 9))
    assert actions[1:] == [Close("a", 2)] and not state.there


def test_who_never_called_is_lost_at_once():
    assert ends(after(*asked("a"), Asked({"z": COMPILE}))[1])[-1].trouble == (
        "z",
        "has not connected",
    )


def test_an_older_number_is_passed_over_and_what_was_not_asked_loses_the_worker():
    events = *asked("a", "b"), Asked({"a": COMPILE})
    state, actions = after(*events, Heard("a", 1, 1, DONE), Heard("b", 1, 1, DONE))
    assert not ends(actions) and {*state.there} == {"a", "b"}
    for number, message in ((2, DONE), (3, DONE)):
        state, actions = after(*events, Heard("b", 1, number, message))
        assert [*state.there] == ["a"] and Close("b", 1) in actions


def test_a_step_is_expected_to_take_as_long_as_the_longest_before():
    state, _ = after(Called("a", 1))
    answers = Trained(commit=COMMIT), Trained(commit=COMMIT), RequestFailed(error="")
    for number, (took_s, answer) in enumerate(
        zip((20.0, 3.0, 90.0), answers, strict=True), 1
    ):
        events = Asked({"a": TRAIN}), took_s, Heard("a", 1, number, answer)
        state, _ = after(*events, state=state)
    assert state.longest_s == {Train: 20.0}  # a failed request does not count
    reached = TellReached(epoch=1)
    told = Reached(at=1, commit=None, is_aborted=False, epoch=1)
    state, _ = after(Asked({"a": reached}), 5.0, Heard("a", 1, 4, told), state=state)
    assert state.longest_s == {Train: 20.0}  # a later TellReached may take longer
    assert Rounds().limit_s(Train) == LIMITS[Train].seconds
    taught = Rounds(longest_s={Train: 20.0}, watchdog_factor=10.0)
    assert taught.limit_s(Train) == 200.0
    assert Rounds(longest_s={Train: 0.1}).limit_s(Train) == LEAST_S
    assert Rounds(longest_s={Train: 1e6}).limit_s(Train) == LIMITS[Train].seconds


def test_the_first_step_is_expected_to_take_what_the_plan_says_and_what_compiling_did():
    compiled = Rounds(longest_s={Compile: 70.0})
    assert compiled.limit_s(Train, 3.0) == 10 * (3.0 + 70.0)
    assert Rounds(longest_s={Compile: 0.1}).limit_s(Train, 3.0) == LEAST_COMPILE_S
    assert compiled.limit_s(Train) == LIMITS[Train].seconds
    assert Rounds().limit_s(Train, 3.0) == LIMITS[Train].seconds
    assert Rounds(longest_s={Compile: 1.0, Train: 90.0}).limit_s(Train, 3.0) == 900.0
    assert replace(compiled, timeout_scale=2.0).limit_s(Train, 3.0) == 1460.0


def test_what_was_asked_with_a_prediction_has_its_limit():
    asked_to = {"a": AwaitSaved(expected_s=9.0), "b": AwaitSaved(expected_s=9.0)}
    state, _ = after(Called("a", 1), Called("b", 1), Asked(asked_to))
    assert state.round is not None and state.round.limit_s == 90.0
    _, actions = after(Heard("a", 1, 1, Done()), 91.0, state=state)
    assert told_to_abort(actions) == ["b"]
    (late,) = [action for action in actions if isinstance(action, Send)]
    assert isinstance(late.request, Abort) and late.request.is_late
    assert late.request.reason.startswith("took more than 90 s to finish a checkpoint")


def test_each_program_that_is_compiled_has_the_limit_anew_within_that_of_all():
    state = Rounds(longest_s={Compile: 2.0})
    state, _ = after(*asked("a"), state=state)
    far = Compiling(num_done=1, num_all=99, epoch=1)
    least_s, most_s = LEAST_COMPILE_S, LIMITS[Compile].seconds
    heard = Heard("a", 1, 1, far)
    _, actions = after(least_s + 1.0, state=state)
    assert told_to_abort(actions) == ["a"]
    _, actions = after(least_s - 1.0, heard, least_s - 1.0, heard, 500.0, state=state)
    assert not told_to_abort(actions)
    _, actions = after(least_s - 1.0, heard, least_s + 1.0, state=state)
    assert told_to_abort(actions) == ["a"]
    often = [least_s - 1.0, heard] * 20
    state, actions = after(*often, state=state)
    assert told_to_abort(actions) == ["a"] and 20 * least_s > most_s


MESSAGES: list[Message] = [
    DONE,
    Done(epoch=0),
    Lost(worker="b", reason="told", epoch=1),
    RequestFailed(error="no room", epoch=1),
]
EVENTS = st.one_of(
    st.builds(Called, st.sampled_from(NAMES), st.integers(1, 4)),
    st.builds(Ended, st.sampled_from(NAMES), st.integers(1, 4), st.just("left")),
    st.builds(TakenForLost, st.sampled_from(NAMES), st.just("gone")),
    st.builds(
        Heard,
        st.sampled_from(NAMES),
        st.integers(1, 4),
        st.integers(1, 4),
        st.sampled_from(MESSAGES),
    ),
    st.builds(
        Asked,
        st.sets(st.sampled_from(NAMES), min_size=1).map(
            lambda names: dict.fromkeys(sorted(names), COMPILE)
        ),
    ),
    st.sampled_from([1.0, 200.0, 8000.0]),
)


@given(st.lists(EVENTS, max_size=30))
def test_whatever_comes_a_round_ends_once_and_only_who_is_there_is_asked(events: list):
    state, now_s, open_rounds = Rounds(), 0.0, 0
    called: dict[str, int] = {}
    for event in [*events, 8000.0, 200.0, 8000.0]:
        if isinstance(event, (int, float)):
            now_s, event = now_s + event, TimePassed()
        if isinstance(event, Asked):
            open_rounds = 1
        if isinstance(event, Called):
            called[event.worker] = max(called.get(event.worker, 0), event.connection)
        state, actions = rounds.react(event, state, now_s)
        for action in actions:
            if isinstance(action, Send):
                assert action.connection == called[action.worker]
            if isinstance(action, Finish):
                open_rounds -= 1
        assert open_rounds in (0, 1) and (state.round is not None) == bool(open_rounds)
        assert not state.there.keys() & state.lost.keys()
        assert all(called[name] == at for name, at in state.there.items())
    assert not open_rounds, "a round never ends"


def test_what_is_decided_does_not_depend_on_when_it_is_decided():
    """The same events give the same actions again."""
    events = [*asked(*NAMES), Ended("b", 1, "left"), Heard("a", 1, 1, DONE), 300.0]
    assert after(*events) == after(*events)
    reached = TellReached(epoch=1)
    assert after(*events, Asked({"a": reached})) == after(
        *events, Asked({"a": reached})
    )
