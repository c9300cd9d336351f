# SPDX-License-Identifier: Apache-2.0
"""Simulated runs notice when a rule of the protocol is broken.

The rules were broken from the protocol's text. Of each that runs notice a seed is kept
that does. The others are in `UNNOTICED`: not all were tried over 1,000 runs, and many
need what no fault of `faults.py` brings about yet, such as the answer to a round that
is over.
"""

import pytest

from experiments.simulation.breaking import Mutation
from experiments.simulation.mutations import MUTATIONS, simulated
from experiments.simulation.run import simulate

NOTICED_AT = {
    "a round is over with the first loss, while others are busy": 64,
    "the others are not told to break off": 160,
    "requests have no limit": 0,
    "breaking off has no limit": 0,
    "the limit is the longest so far, not ten times that": 0,
    "a worker whose controller is gone stays": 1,
    "breaking off waits for its turn": 558,
    "a step that is broken off keeps the commit of the one before": 433,
    "a commit that only some have is dropped": 3,
    "those one step behind are not given the commit": 507,
    "what survivors have in memory is not asked for": 0,
    "a loss while the run starts ends it": 54,
    "a save begins while another is being written": 3,
    "a step is saved once one worker has its part": 3,
    "only the last that is written stays": 47,
    "a run ends without saving its last step": 1,
    "a node leaves before its state was handed over": 317,
    "what a node that leaves has in memory is not taken": 317,
    "one that fails is not lost": 33,
    "losses are counted across steps": 64,
    "the newest save is taken, whole or not": 458,
}
UNNOTICED = {
    "the newest that all have may go while another is written",
    "the answer to an earlier round is taken for this one's",
    "the epoch of an answer is not looked at",
    "the kind of an answer is not looked at",
    "what was told comes before what was seen",
    "the connection of one that is lost is left open",
    "an older start that calls takes the place of the newer",
    "the answer of an older start counts",
    "the end of an older connection loses the newer start",
    "the epoch does not grow",
    "a worker does what is asked of an earlier epoch",
    "what was asked last is done first",
    "a state of another step is saved",
    "all that are behind finish the step, however far",
    "the commit of a step before the newest counts",
    "a node that is lost again and again is not left out",
    "no number of losses ends the run",
    "a node leaves whether or not the others can go on",
    "leaves of different attempts go together",
    "saves of steps that were given up are taken",
    "a step is saved whatever the attempts at it",
    "the store is asked only if the workers have nothing",
    "a run begins anew though something was saved",
    "a node that comes is not taken in",
    "all go on after a round, though something was damaged",
    "not all have their state in place when the run goes on",
    "a checkpoint stays the newest though its disks are gone",
}
NOTICED = [mutation for mutation in MUTATIONS if mutation.what in NOTICED_AT]


@pytest.mark.parametrize("mutation", NOTICED, ids=lambda mutation: mutation.what)
def test_a_run_notices_a_broken_rule(mutation: Mutation):
    assert simulated(mutation, NOTICED_AT[mutation.what]) is not None


@pytest.mark.parametrize("seed", sorted({*NOTICED_AT.values()}))
def test_the_same_run_goes_well_where_no_rule_is_broken(seed: int):
    assert simulate(seed).violation is None


def test_of_each_broken_rule_it_is_known_whether_runs_notice_it():
    known = [*NOTICED_AT, *UNNOTICED]
    assert sorted(known) == sorted(mutation.what for mutation in MUTATIONS)
