# SPDX-License-Identifier: Apache-2.0
"""Of several controllers of one run, only one commits at a time, whatever fails."""

from collections.abc import Callable
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from experiments.simulation.contenders import contend
from experiments.simulation.world import Violation
from hetjax.checkpoint.leases import lease
from hetjax.checkpoint.leases.lease import Fence, Lease

NUM_RUNS = 200


def test_one_commits_at_a_time_and_each_that_nothing_stops_has_its_turn():
    runs = [contend(seed) for seed in range(NUM_RUNS)]
    assert sum(found.num_done for found in runs) > NUM_RUNS
    assert sum(found.num_lost for found in runs) > NUM_RUNS / 20  # were overtaken


@contextmanager
def _checked_before_alone(fence: Fence, undo: Callable[[], None]):
    fence.check()
    yield


def _unheeding(fence: Fence) -> None:
    pass


def _at_once(*args: object) -> None:
    pass


def _never_renewed(self: Lease) -> None:
    pass


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (Fence, "check", _unheeding),
        (Fence, "around", _checked_before_alone),
        (lease, "_await_end", _at_once),
        (Lease, "_renew", _never_renewed),
    ],
    ids=["not looked at", "not looked at after", "not waited for", "not renewed"],
)
def test_a_lease_whose_rule_is_broken_is_noticed(
    owner: object, name: str, other: object
):
    with patch.object(owner, name, other), pytest.raises(Violation):
        for seed in range(NUM_RUNS):
            contend(seed)
