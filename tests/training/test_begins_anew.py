# SPDX-License-Identifier: Apache-2.0
"""When a start begins anew despite parts of a save that was never reported."""

import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from hetjax.checkpoint.recovery_plan import PartialSnapshot
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.errors import BadInput
from hetjax.training.directory.leftover_checkpoints import check_begins
from hetjax.training.driver_setup import may_have_saved_on

NOWHERE = CheckpointStorage(directory="d")
never_saved = partial(check_begins, NOWHERE, None, ())
PART = PartialSnapshot(
    worker="a",
    tier="disk",
    save=(5, "first"),
    leaves=frozenset("x"),
    absent=frozenset({"c", "d@1"}),
)


def test_a_save_that_may_be_whole_with_who_was_not_asked_is_not_passed_over():
    with pytest.raises(
        BadInput, match=r"(?s)step 5 that may need the parts on c.*--plan"
    ):
        never_saved([PART], ["a", "b", "d/1"], None)


def test_a_run_that_may_have_saved_elsewhere_without_telling_does_not_begin_anew():
    was_on_a_and_b = partial(check_begins, NOWHERE, None, {"a", "b"})
    with pytest.raises(BadInput, match=r"(?s)run was last on b,.*--plan"):
        was_on_a_and_b([], ["a", "c/1"], None)
    was_on_a_and_b([], ["a", "b/1", "c"], None)
    was_on_a_and_b([PART], ["a", "c", "d/1"], 5)


@pytest.mark.parametrize(
    ("last_step", "every", "local", "expected"),
    [(5, 5, "/disk", {"a"}), (4, 5, "/disk", set()), (9, 0, "/disk", set())]
    + [(9, 5, None, set())],
)
def test_a_run_may_have_saved_on_disks_of_hosts_once_it_has_trained_for_long_enough(
    last_step: int, every: int, local: str | None, expected: set[str]
):
    lines = [{"step": step} for step in range(1, last_step + 1)]
    kept = SimpleNamespace(local=local, every=every)
    start: Any = SimpleNamespace(
        config=SimpleNamespace(checkpoint=kept),
        previous=SimpleNamespace(plan=SimpleNamespace(nodes={"a"})),
    )
    assert may_have_saved_on(start, lines, local is not None) == expected


def test_what_is_not_whole_on_all_who_saved_it_was_never_saved():
    never_saved([PART], ["a", "c", "d/1"], None)
    never_saved([], ["a"], None)


def test_a_later_save_that_may_be_whole_elsewhere_is_told_of():
    with pytest.warns(
        UserWarning, match=r"from step 4: .* step 5 .* parts of c.*--plan"
    ):
        never_saved([PART], ["a", "b", "d/1"], 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        never_saved([PART], ["a", "b", "d/1"], 5)
        never_saved([PART], ["a", "c", "d/1"], 4)
