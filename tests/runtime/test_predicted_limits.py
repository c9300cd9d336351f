# SPDX-License-Identifier: Apache-2.0
"""Limits follow the predicted time of a phase, within the bounds of the table."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.checkpoint.recovery_plan import CLOUD, PartialSnapshot
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.plans.plan import Prediction
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.control.recovery import restore
from hetjax.runtime.execution.commit import StepCommit
from hetjax.runtime.rpc import schema
from hetjax.runtime.rpc.limits import LEAST_COMPILE_S, LEAST_S, limit_s
from hetjax.runtime.rpc.message import LIMITS
from hetjax.runtime.rpc.schema import (
    AwaitSaved,
    Collected,
    CollectLeaves,
    Compile,
    Done,
    Leave,
    NeededState,
    PlaceState,
    Request,
    SaveState,
    SavingState,
    TellNeeds,
    TellSaving,
    Train,
    Trained,
)
from tests.training.pair import TWO_REPLICAS

COMMIT = StepCommit(squares=1.0, losses=(), num_tokens=8)
STORAGE = CheckpointStorage(directory="/nowhere")
MB = 10**6
SECONDS = st.none() | st.floats(0, 1e6)


class Told:
    """Connections to workers that fulfil every request at once."""

    only, epoch = None, 0

    def __init__(self, leaves: Mapping[str, int]) -> None:
        self.asked: list[Request[Any]] = []
        self._answers: Mapping[type, schema.Message] = {
            Train: Trained(commit=COMMIT),
            TellNeeds: NeededState(at=None, leaves=leaves),
            TellSaving: SavingState(saves=True),
            CollectLeaves: Collected(missing=(), num_bytes={}, seconds={}),
        }

    def ask(self, requests: Mapping[str, Request[Any]], progress: Any = None) -> Any:
        self.asked += requests.values()
        return {w: self._answers.get(type(r), Done()) for w, r in requests.items()}

    def expected_s(self, kind: type[Request[Any]]) -> set[float | None]:
        return {asked.expected_s for asked in self.asked if isinstance(asked, kind)}


def controller(
    step_s: float | None = None, leaves: Mapping[str, int] | None = None
) -> tuple[Controller, Told]:
    plan = replace(TWO_REPLICAS, predicted=Prediction(step_time_s=step_s))
    told = Told(leaves or {})
    found = Controller(plan, told)  # pyright: ignore[reportArgumentType]
    found.predicts_steps = True
    return found, told


def on_disk(worker: str, leaf: str) -> PartialSnapshot:
    return PartialSnapshot(
        worker=worker, tier="disk", save=(4, "1"), leaves=frozenset(leaf)
    )


@given(SECONDS, SECONDS, st.floats(1, 1e3), st.sampled_from([Train, Compile, Leave]))
def test_a_limit_is_within_the_table_and_leaves_time_for_what_is_expected(
    predicted_s: float | None, longest_s: float | None, factor: float, what: Any
):
    most_s, found_s = (
        LIMITS[what].seconds,
        limit_s(what, predicted_s, longest_s, factor),
    )
    known_s = [s for s in (predicted_s, longest_s) if s is not None]
    assert found_s <= most_s
    is_first = what is Train and predicted_s is not None
    assert found_s >= (LEAST_COMPILE_S if what is Compile or is_first else LEAST_S)
    assert all(found_s == most_s or found_s >= factor * s for s in known_s)
    assert known_s or found_s == most_s


def test_the_first_step_of_a_plan_is_asked_for_with_what_the_plan_says():
    asks, told = controller(step_s=2.5)
    for number in range(3):
        asks.step(number)
    trained = [a.expected_s for a in told.asked[:: len(asks.workers)]]
    assert trained == [2.5, None, None]
    asks.adopt(replace(asks.plan, predicted=Prediction(step_time_s=4.0)))
    asks.step(3)
    assert told.asked[-1].expected_s == 4.0


def test_a_plan_for_other_devices_says_nothing_of_steps_on_these():
    for step_s, is_of_these in ((2.5, False), (None, True)):
        asks, told = controller(step_s=step_s)
        asks.predicts_steps = is_of_these
        asks.step(0)
        assert told.expected_s(Train) == {None}


@pytest.mark.parametrize(("copies", "cloud"), [(1, None), (2, None), (1, "gs://a/b")])
def test_saving_should_take_what_its_bytes_do_at_twenty_megabytes_a_second(
    copies: int, cloud: str | None
):
    asks, told = controller()
    asks.state_bytes = {"left": 60 * MB, "right": 40 * MB}
    storage = replace(STORAGE, copies=copies, cloud=cloud)
    asks._copying = asks.connections.epoch, copies  # they know where copies go
    assert asks.save(storage, 1, {})
    asks.end()
    assert told.expected_s(SaveState) == {5.0}
    written_s = None if cloud else copies * 5.0  # a store may be arbitrarily slow
    assert told.expected_s(AwaitSaved) == told.expected_s(Leave) == {written_s}


@pytest.mark.parametrize("has_store", [False, True])
def test_what_is_moved_should_take_what_its_bytes_do(has_store: bool):
    asks, told = controller(leaves={"a": 200 * MB, "b": 100 * MB})
    held = [on_disk("left", "a"), on_disk("right", "b")]
    if has_store:
        held[1] = replace(held[1], worker=CLOUD, tier="cloud")
    assert restore(asks, held, STORAGE) is not None
    moved_s = None if has_store else 30.0  # both workers get both
    assert told.expected_s(CollectLeaves) == {moved_s}
    assert told.expected_s(PlaceState) == {30.0}
