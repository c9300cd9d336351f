# SPDX-License-Identifier: Apache-2.0
"""Every possible course of a small run ends well; broken rules are detected."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from unittest.mock import patch

import pytest

from experiments.simulation import exhaustive
from experiments.simulation.broken_recovery import RECOVERY
from experiments.simulation.exhaustive import Broken, State, explore

NUM_STATES = 43_827


def rule(what: str) -> AbstractContextManager[None]:
    (mutation,) = [mutation for mutation in RECOVERY if mutation.what == what]
    return mutation.broken()


def test_whoever_is_lost_when_the_run_ends_saved_unless_a_disk_took_the_state_along():
    found = explore()
    assert found.num_states == NUM_STATES
    assert found.ends.keys() == {"done", "lost"}


@pytest.mark.parametrize(
    "what",
    [
        "a commit that only some have is dropped",
        "those one step behind are not given the commit",
        "the newest that all have may go while another is written",
    ],
)
def test_a_broken_rule_shows(what: str):
    with rule(what), pytest.raises(Broken):
        explore()


def _one_has_its_part(state: State) -> bool:
    return any(state.of(name).newest == state.saving for name in exhaustive.SAVES)


def _step_alone(state: State) -> bool:
    newest = [state.of(name).newest for name in exhaustive.SAVES]
    assert state.saving is not None
    return all(save is not None and save[0] == state.saving[0] for save in newest)


@pytest.mark.parametrize("is_saved", [_one_has_its_part, _step_alone])
def test_what_is_not_whole_is_not_said_to_be_saved(is_saved: Callable[[State], bool]):
    with ExitStack() as stack:
        stack.enter_context(patch.object(exhaustive, "is_saved", is_saved))
        stack.enter_context(pytest.raises(Broken, match="is said to be saved"))
        explore()
