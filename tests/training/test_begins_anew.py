# SPDX-License-Identifier: Apache-2.0
"""When a start begins anew, though parts of a save that was never told of are there."""

import warnings
from functools import partial

import pytest

from hetjax.checkpoint.recovery_plan import PartialSnapshot
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.errors import BadInput
from hetjax.training.left_checkpoints import check_begins

never_saved = partial(check_begins, CheckpointStorage(directory="d"), None, False)
PART = PartialSnapshot(
    worker="a",
    tier="disk",
    save=(5, "first"),
    leaves=frozenset("x"),
    absent=frozenset({"c", "d@1"}),
)


def test_a_save_that_may_be_whole_with_who_was_not_asked_is_not_passed_over():
    with pytest.raises(BadInput, match=r"(?s)step 5 that may be .* parts of c.*--plan"):
        never_saved([PART], ["a", "b", "d/1"], None)


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
