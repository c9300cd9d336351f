# SPDX-License-Identifier: Apache-2.0
"""When a start begins anew, though parts of a save that was never told of are there."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hetjax.checkpoint.recovery_plan import PartialSnapshot
from hetjax.errors import BadInput
from hetjax.training.starting import _check_begins

NEVER_SAVED = cast(Any, SimpleNamespace(config=None, saved=None))
PART = PartialSnapshot(
    worker="a",
    tier="disk",
    save=(5, "first"),
    leaves=frozenset("x"),
    absent=frozenset({"c", "d@1"}),
)


def test_a_save_that_may_be_whole_with_who_was_not_asked_is_not_passed_over():
    with pytest.raises(BadInput, match=r"(?s)step 5 that may be .* parts of c.*--plan"):
        _check_begins(NEVER_SAVED, [PART], ["a", "b", "d/1"])


def test_what_is_not_whole_on_all_who_saved_it_was_never_saved():
    _check_begins(NEVER_SAVED, [PART], ["a", "c", "d/1"])
    _check_begins(NEVER_SAVED, [], ["a"])
