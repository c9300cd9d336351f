# SPDX-License-Identifier: Apache-2.0
"""Peaks of stages against predictions, and only stages that fit are run."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import optax
import pytest

from experiments.gpu.claims import CLAIMS
from experiments.gpu.parts import memory
from experiments.gpu.processes import start
from experiments.gpu.processes.start import NotInTime, NotStarted, Started, started
from experiments.gpu.rows import Row
from experiments.gpu.setting import Setting
from hetjax.cluster.cluster import Node
from hetjax.cluster.memory_budget import node_plan_bytes
from hetjax.costs.measured.compiled import NOTHING

H100 = Node(name="node", device="H100-80GB-HBM3", count=1)
SMALL = Node(name="node", device="GeForce-RTX-4090", count=1)
GIB = 2**30


@pytest.fixture(scope="module")
def rows() -> Mapping[str, Row]:
    return {
        row.what: row for row in memory.measure(Setting(platform="cpu", quick=True))
    }


@pytest.mark.nightly
def test_each_stage_has_its_prediction_and_that_of_the_compiler(
    rows: Mapping[str, Row],
):
    for stage in ("remat selective, 1 x 32", "remat none, 2 x 64"):
        by_model = rows[f"peak of memory, tiny, {stage} positions"]
        compiled = rows[f"peak of memory once compiled, tiny, {stage} positions"]
        assert by_model.measured == compiled.measured == compiled.predicted
        assert "compiler's total" in by_model.note
        assert by_model.ratio == pytest.approx(1, abs=0.1)


@pytest.mark.nightly
def test_a_process_starts_and_a_cpu_has_no_limit(rows: Mapping[str, Row]):
    assert rows[memory.STARTS].measured is True
    assert rows["a process starts with 90% of the memory"].measured is True
    assert rows[memory.FILLED].measured is None
    assert rows["memory of JAX at 92%"].predicted == pytest.approx(0.92 * 4 * GIB)


@pytest.mark.nightly
def test_every_claim_is_decided_by_a_row(rows: Mapping[str, Row]):
    wanted = {claim.what for claim in CLAIMS if claim.part == "memory"}
    assert {memory.STARTS, memory.FILLED} < wanted <= rows.keys()


def test_a_process_that_does_not_start_says_why():
    with pytest.raises(NotStarted, match="no-such-platform"):
        started("no-such-platform", 0.9, 60.0)


def test_a_process_that_had_no_time_to_start_is_not_judged():
    with pytest.raises(NotInTime, match="not within 0 s") as late:
        started("cpu", 0.9, 0.01)
    assert memory._not_started("starts", late.value).measured is None
    assert memory._not_started("starts", NotStarted("no card")).measured is False


def test_what_jax_the_driver_and_plans_have_add_up():
    found = Started(
        node=H100, bytes_limit=73 * GIB, used_bytes=74 * GIB, is_filled=True
    )
    shared = {row.what: row for row in memory._shared(found, 0.92)}
    limit = shared["memory of JAX at 92%"]
    assert limit.ratio == pytest.approx(73 / (0.92 * 79.6), rel=0.01)
    assert shared["memory outside of JAX's"].measured == GIB
    share = shared["memory that plans may fill, of what JAX has"].measured
    assert share == pytest.approx(node_plan_bytes(H100) / (73 * GIB))


class Card:
    """A device whose allocator has the given limit."""

    device_kind, platform, id = "NVIDIA H100 80GB HBM3", "gpu", 0

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 73 * GIB}


@pytest.mark.parametrize(("most", "is_filled"), [(72 * GIB, True), (70 * GIB, False)])
def test_what_plans_may_fill_is_filled(
    monkeypatch: pytest.MonkeyPatch, most: int, is_filled: bool
):
    held = 0

    def ones(size: int, dtype: Any, device: Any) -> int:
        nonlocal held
        held += size
        if held > most:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return size

    monkeypatch.setattr(start.jnp, "ones", ones)
    device: Any = Card()
    assert start._is_filled(device, node_plan_bytes(H100)) is is_filled


def usual(node: Node) -> list[Any]:
    return [*memory._fitting(Setting(), node)]


def test_a_smaller_card_gets_smaller_stages():
    """All are below what plans may fill, according to the memory model."""
    for node, largest in ((H100, "llama-1b"), (SMALL, "gpt2-124m")):
        found = usual(node)
        assert len(found) >= 6
        assert found[0].task.model == largest
        for candidate in found:
            used = candidate.stage.memory(optax.adamw(1e-4), NOTHING)
            assert used.total_bytes == candidate.predicted_bytes
            assert candidate.predicted_bytes <= node_plan_bytes(node)


def test_no_more_stages_run_at_once_than_have_room(monkeypatch: pytest.MonkeyPatch):
    begun: list[str] = []

    def begin(name: str, task: Any) -> str:
        begun.append(task.model)
        return task.model

    monkeypatch.setattr(memory, "Way", begin)
    room = node_plan_bytes(H100)
    sizes = {"a": 0.6, "b": 0.3, "c": 0.3, "d": 0.1, "e": 0.1, "f": 0.1, "g": 0.1}

    def candidates() -> Iterator[Any]:
        for name, share in sizes.items():
            yield Candidate(name, share * room)

    running = memory._running(Setting(), candidates(), H100)
    seen: list[Any] = [(way, [*begun]) for _, way in running]
    assert [way for way, _ in seen] == [*sizes]
    done = deque[str]()
    for way, started_by_then in seen:
        at_once = [name for name in started_by_then if name not in done]
        assert sum(sizes[name] for name in at_once) <= 1
        assert len(at_once) <= 3
        done.append(way)
    assert max(len(b) - at for at, (_, b) in enumerate(seen)) == 3


class Candidate:
    def __init__(self, model: str, predicted_bytes: float) -> None:
        self.model, self.predicted_bytes, self.task = model, predicted_bytes, self
