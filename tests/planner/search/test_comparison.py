# SPDX-License-Identifier: Apache-2.0
"""How a limited time is divided between the search and the questions beside it."""

import pytest

from hetjax.planner.model.deadline import deadline, left_s
from hetjax.planner.model.objectives import Objective
from hetjax.planner.search import comparison
from hetjax.planner.search.comparison import Questions, planned
from tests.planner.whole_space import two_kinds


class Asked(Exception):
    """Ends a search that was only asked how long it may take."""


@pytest.mark.parametrize(
    ("questions", "share"),
    [
        (Questions(baselines=()), 1.0),
        (Questions(), 3 / 4),  # the plan matters more than plans nobody asked for
        (Questions(baselines=("megatron",)), 1 / 2),
        (Questions(baselines=(), what_if=True), 1 / 2),
        (Questions(what_if=True), 3 / 7),
    ],
)
def test_the_search_gets_its_share_of_the_time(
    questions: Questions, share: float, monkeypatch: pytest.MonkeyPatch
):
    seconds: list[float] = []

    def alone(*given: object) -> None:
        seconds.append(left_s())
        raise Asked

    monkeypatch.setattr(comparison, "_alone", alone)
    with deadline(1000.0), pytest.raises(Asked):
        planned(two_kinds(), Objective(), questions, profile_path=None, progress=print)
    assert seconds[0] == pytest.approx(1000.0 * share, rel=0.01)


def test_without_other_planners_all_the_time_is_left_after_the_search(
    monkeypatch: pytest.MonkeyPatch,
):
    seconds: list[float] = []

    def compared(*given: object) -> None:
        seconds.append(left_s())
        raise Asked

    monkeypatch.setattr(comparison, "_alone", lambda *given: None)
    monkeypatch.setattr(comparison, "_compared", compared)
    nobody = Questions(baselines=())
    with deadline(1000.0), pytest.raises(Asked):
        planned(two_kinds(), Objective(), nobody, profile_path=None, progress=print)
    assert seconds[0] == pytest.approx(1000.0, rel=0.01)
