# SPDX-License-Identifier: Apache-2.0
"""Simulated runs notice when a rule of the protocol is broken.

The mutations break rules of the protocol's text. For each mutation that runs notice, a
seed of such a run is listed. Another rule covers most of the remaining mutations; a
test of the mutated function notices those.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from experiments.simulation.breaking import Mutation
from experiments.simulation.mutations import MUTATIONS, simulated
from experiments.simulation.run import simulate
from hetjax.checkpoint.stores.local import FileStore
from hetjax.runtime.control import recovery_decisions
from hetjax.runtime.execution.commit import StepCommit
from hetjax.runtime.rpc.schema import Reached
from tests.checkpoint import test_uploader
from tests.runtime import (
    test_duties,
    test_epochs,
    test_recovery_decisions,
    test_rounds,
)
from tests.runtime.test_recovery_decisions import at, commit

TURNED_AWAY = (
    test_rounds.test_an_older_start_is_turned_away_and_its_end_is_no_loss_of_the_newer
)


def commit_is(
    reached: dict[str, Reached], expected: StepCommit | None, late: list[str]
) -> None:
    """Assert the decision of whichever function makes it at present."""
    assert recovery_decisions.committed_step(reached) == (expected, late)


def _goes_back_to_what_is_stored() -> None:
    with TemporaryDirectory() as folder:
        test_uploader.test_the_newest_step_that_the_run_may_go_back_to_stays(
            FileStore(Path(folder) / "store"), Path(folder), 20
        )


NOTICED_AT = {
    "a round is over with the first loss, while others are busy": 5,
    "the answer to an earlier round is taken for this one's": 399,
    "the epoch of an answer is not looked at": 18,
    "the kind of an answer is not looked at": 134,
    "one that fails is not lost": 201,
    "the others are not told to abort": 643,
    "requests have no limit": 0,
    "an abort has no limit": 0,
    "the connection of one that is lost is left open": 17,
    "the limit is the longest so far, not ten times that": 0,
    "a worker whose controller is gone stays": 23,
    "an abort waits for its turn": 643,
    "an aborted step keeps the commit of the one before": 643,
    "a commit that only some have is dropped": 16,
    "what survivors have in memory is not asked for": 6,
    "losses are counted across steps": 27,
    "a node that is lost again and again is not left out": 3,
    "no number of losses ends the run": 2,
    "the newest save is taken, whole or not": 68,
    "saves of steps that were given up are taken": 352,
    "not all have their state in place when the run goes on": 68,
    "all go on after a round, though something was damaged": 109,
    "a loss while the run starts ends it": 3,
    "a run begins anew though something was saved": 78,
    "what a run has gone back from is there for the next start": 533,
    "a save begins while another is being written": 19,
    "a state of another step is saved": 0,
    "a step is saved once one worker has its part": 13,
    "a step is saved whatever the attempts at it": 18,
    "the newest that all have may go while another is written": 4,
    "only the last that is written stays": 0,
    "who hung removes what a later start has saved": 1085494,
    "a checkpoint stays the newest though its disks are gone": 68,
    "a run ends without saving its last step": 0,
    "a node leaves before its state was handed over": 6,
    "what a node that leaves has in memory is not taken": 6,
    "a node that comes is not taken in": 47,
    "a last checkpoint that is gone from the disks is taken for stored": 3290,
    "a manifest is uploaded before its files": 143,
    "a step is committed with the parts that are there": 33,
    "files are removed before the manifest that lists them": 33,
    "a recovery needs an answer of the store": 3495,
}
# Rules that another rule covers, so that no run depends on them, with the test of the
# pure function that implements them
COVERED: dict[str, Callable[[], object]] = {
    # The next round would detect the loss of the others
    "what was told comes before what was seen": (
        test_rounds.test_what_was_seen_comes_before_what_was_told
    ),
    # Older starts: their connections are closed first (5), and each start is known (7)
    "an older start that calls takes the place of the newer": TURNED_AWAY,
    "the answer of an older start counts": TURNED_AWAY,
    "the end of an older connection loses the newer start": TURNED_AWAY,
    # Requests of one controller arrive in order, and peers are called at new addresses
    "the epoch does not grow": (
        test_epochs.test_each_time_workers_are_connected_is_of_another_epoch
    ),
    "a worker does what is asked of an earlier epoch": (
        test_duties.test_no_request_of_an_epoch_that_is_over_is_begun
    ),
    # After a round, no worker still handles a request (1), so none is queued
    "what was asked last is done first": (
        test_duties.test_requests_are_begun_one_after_the_other_and_answered_as_they_were_asked
    ),
    # No step starts before all workers have done the previous one (10)
    "all that are behind finish the step, however far": partial(
        commit_is, {"a": at(1), "b": at(3), "c": at(2)}, commit(3), ["c"]
    ),
    # All workers that get a state have all of it before the first continues from it
    # (16)
    "the commit of a step before the newest counts": partial(
        commit_is, {"a": at(3, knows=False), "b": at(2)}, None, []
    ),
    # A machine would have to be lost with its disk during one save, and another one
    # during the next
    "what is left of the saves after a loss may go while another is written": (
        test_recovery_decisions.test_no_save_removes_what_the_run_would_go_back_to
    ),
    # If the store has what the disks lack, it is mostly of the same step (19)
    "the store is asked only if the workers have nothing": (
        test_recovery_decisions.test_the_store_is_asked_where_it_may_have_what_the_workers_lack
    ),
    # Few runs roll back while the store has only what they discard
    "what the run may go back to goes from the store": _goes_back_to_what_is_stored,
}
REDUNDANT = {
    # A leaf is read by save and attempt, so leaves of other attempts are missing (16)
    "leaves of different attempts go together",
    # A run without a plan for the remaining nodes keeps its plan
    "a node leaves whether or not the others can go on",
}
# The exhaustive test of a small run notices it (`test_exhaustive.py`)
NOTICED_OF_ALL_WAYS = {"those one step behind are not given the commit"}
NOTICED = [mutation for mutation in MUTATIONS if mutation.what in NOTICED_AT]


@pytest.mark.parametrize("mutation", NOTICED, ids=lambda mutation: mutation.what)
def test_a_run_notices_a_broken_rule(mutation: Mutation):
    assert simulated(mutation, NOTICED_AT[mutation.what]) is not None


@pytest.mark.parametrize("seed", sorted({*NOTICED_AT.values()}))
def test_the_same_run_goes_well_where_no_rule_is_broken(seed: int):
    assert simulate(seed).violation is None


@pytest.mark.parametrize("what", COVERED)
def test_a_test_of_a_function_notices_what_no_run_does(what: str):
    (mutation,) = [mutation for mutation in MUTATIONS if mutation.what == what]
    COVERED[what]()
    with mutation.broken(), pytest.raises(AssertionError):
        COVERED[what]()


def test_of_each_broken_rule_it_is_known_whether_runs_notice_it():
    known = [*NOTICED_AT, *COVERED, *REDUNDANT, *NOTICED_OF_ALL_WAYS]
    assert sorted(known) == sorted(mutation.what for mutation in MUTATIONS)
