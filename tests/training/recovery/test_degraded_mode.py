# SPDX-License-Identifier: Apache-2.0
"""How long degraded mode lasts: until the lost worker has called and compiled."""

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from hetjax.cluster.cluster import Node
from hetjax.plans.worker_map import WorkerMap
from hetjax.runtime.rpc.message import LIMITS
from hetjax.runtime.rpc.schema import Compile
from hetjax.runtime.rpc.worker_connections import WorkerLost
from hetjax.training.recovery.degraded_mode import DegradedMode
from tests.training.pair import TWO_REPLICAS

NOW: Any = SimpleNamespace(settings={"plan": "of now"})


class Others:
    """A controller and a launcher of two workers, of which `right` is lost."""

    def __init__(self, *nodes: Node) -> None:
        self.has_called = self.has_compiled = False
        self.asked: list[Any] = []
        self.begun: list[str] = []
        self.plan, self.workers = TWO_REPLICAS, ["left"]
        self.members = WorkerMap(TWO_REPLICAS, nodes)
        self.connections = SimpleNamespace(
            workers=["left"], interrupted_by=lambda interrupt: nullcontext()
        )

    def begin(self, workers: Sequence[str]) -> None:
        self.begun += workers

    def are_there(self, workers: Sequence[str]) -> bool:
        return self.has_called

    def begin_compiling(self, settings: Any, workers: Sequence[str]) -> None:
        self.asked.append((settings, [*workers]))

    def are_compiled(self, workers: Sequence[str]) -> bool:
        return self.has_compiled


@pytest.fixture(autouse=True)
def left_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "hetjax.training.recovery.degraded_mode.finish_step", lambda *_: None
    )
    monkeypatch.setattr(
        "hetjax.training.recovery.degraded_mode.take_over", lambda *_: 4
    )


def begun(others: Any) -> DegradedMode:
    degraded = DegradedMode(others, others, SimpleNamespace(transport="sockets"))  # pyright: ignore
    lost = WorkerLost("right", "ended")
    assert degraded.begin(lost, TWO_REPLICAS, 4, lambda: None) is not None
    return degraded


def test_it_lasts_until_what_was_lost_has_called_and_compiled_for_the_plan_of_now():
    others = Others()
    degraded = begun(others)
    assert others.begun == ["right"]
    others.has_called = True
    assert not degraded.is_over(4, NOW) and not others.asked  # it lasts at least a step
    others.has_called = False
    assert not degraded.is_over(5, NOW) and not others.asked
    others.has_called = True
    for at in (6, 7):
        assert not degraded.is_over(at, NOW)
        assert others.asked == [(NOW.settings, ["right"])]
    others.has_compiled = True
    assert degraded.is_over(8, NOW)


def test_it_does_not_last_for_ever_where_compiling_does(
    monkeypatch: pytest.MonkeyPatch,
):
    others, now_s = Others(), 100.0
    monkeypatch.setattr(
        "hetjax.training.recovery.degraded_mode.time.monotonic", lambda: now_s
    )
    degraded, others.has_called = begun(others), True
    assert not degraded.is_over(5, NOW)
    now_s += LIMITS[Compile].seconds
    assert not degraded.is_over(6, NOW)
    now_s += 1.0
    assert degraded.is_over(7, NOW)


def test_hosts_of_one_node_are_not_let_compile_each_for_itself():
    right = Node(name="right", device="H20", count=2, hosts=2)
    others = Others(Node(name="left", device="A100-SXM4-80GB", count=1), right)
    degraded, others.has_called = begun(others), True
    assert degraded.is_over(5, NOW) and not others.asked


def test_one_that_is_lost_meanwhile_is_met_in_the_ordinary_way():
    others = Others()
    degraded, others.has_called = begun(others), True

    def lost(settings: Any, workers: Sequence[str]) -> None:
        raise WorkerLost(workers[0], "closed the connection")

    others.begin_compiling = lost
    with pytest.warns(UserWarning, match="it is started once more"):
        assert degraded.is_over(5, NOW)
