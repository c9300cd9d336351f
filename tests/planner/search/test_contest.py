# SPDX-License-Identifier: Apache-2.0
"""How planners in a contest share a limited time, on a fake clock."""

from collections.abc import Callable, Iterator

import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.model import deadline as clock
from hetjax.planner.model.deadline import TimeUp, deadline, left_s
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search import contest as contests
from hetjax.planner.search.contest import ALONE, CONTESTANTS, EVEN, Contestant, contest
from hetjax.schedule.predicted import Predicted
from tests.training.small import MODEL

KINDS = ("H20", "L4", "V100-SXM2-32GB")
REQUEST = PlanRequest(
    model=MODEL,
    cluster=Cluster(
        name="mixed",
        nodes=tuple(Node(name=f"n-{k}", device=k, count=1) for k in KINDS),
    ),
    seq_len=16,
    global_batch=4,
)
NO_PLAN = NoFeasiblePlan(got="too large", allowed="less", fix="take less")


class Clock:
    """A stand-in for the module `time`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    turned = Clock()
    monkeypatch.setattr(clock, "time", turned)
    yield turned


@pytest.mark.parametrize(
    ("limit_s", "share", "given"),
    [
        (20.0, 1.0, [5.0, 5.0, 5.0, 5.0]),  # each uses all of its share
        (20.0, 0.0, [5.0, 20 / 3, 10.0, 20.0]),
        (24.0, 0.5, [6.0, 7.0, 8.75, 13.125]),
    ],
)
def test_each_may_take_an_equal_share_of_what_is_left(
    limit_s: float,
    share: float,
    given: list[float],
    time: Clock,
    monkeypatch: pytest.MonkeyPatch,
):
    seen: list[float] = []

    def plan(request: PlanRequest) -> Predicted:
        seen.append(left_s())
        time.now_s += share * left_s()
        raise (NO_PLAN if len(seen) % 2 else TimeUp)

    fakes = {name: Contestant(about="", plan=plan) for name in "abcd"}
    monkeypatch.setattr(contests, "CONTESTANTS", fakes)
    begun: list[str] = []
    with deadline(limit_s):
        found = list(contest(REQUEST, begun.append))
    assert seen == pytest.approx(given)
    assert begun == list("abcd")
    assert found == [("a", NO_PLAN), ("b", None), ("c", NO_PLAN), ("d", None)]


def searched(
    time: Clock, monkeypatch: pytest.MonkeyPatch, takes: Callable[[int], float]
) -> list[str]:
    """Return the kinds searched in ten seconds; the n-th search takes `takes(n)` s."""
    kinds = list[str]()

    def search(request: PlanRequest) -> Predicted:
        (node,) = request.cluster.nodes
        kinds.append(node.device)
        time.now_s += takes(len(kinds))
        if not left_s():
            raise TimeUp
        return CONTESTANTS[EVEN].plan(request)

    monkeypatch.setattr(contests, "_ours", search)
    # no kind is skipped because of its bound
    monkeypatch.setattr(contests, "compute_bound_s", lambda problem: 0.0)
    with deadline(10.0):
        found = CONTESTANTS[ALONE].plan(REQUEST)
    assert {stage.node for _, _, stage in found.plan.stages()} == {f"n-{kinds[0]}"}
    return kinds


def test_a_plan_of_one_kind_is_kept_where_no_time_is_left_for_the_next(
    time: Clock, monkeypatch: pytest.MonkeyPatch
):
    assert searched(time, monkeypatch, lambda n: 1.0 if n == 1 else 9.0) == [*KINDS[:2]]


def test_without_time_for_any_kind_there_is_no_word_on_memory(
    time: Clock, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(TimeUp):
        searched(time, monkeypatch, lambda n: 10.0)
