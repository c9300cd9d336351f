# SPDX-License-Identifier: Apache-2.0
"""Which run owns the disks of workers, at a run's start and when nodes join."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hetjax.checkpoint.recovery_plan import PartialSnapshot
from hetjax.checkpoint.run_identity import RunIdentity
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.errors import BadInput
from hetjax.runtime.control import recovery
from hetjax.training.recovery.surviving_state import SurvivingState

OWN = RunIdentity(id="1111")
HELD = BadInput(got="a folder in use by run 2222", allowed="one run", fix="wait")


def saved(worker: str, run: str, is_trusted: bool = True) -> PartialSnapshot:
    return PartialSnapshot(
        worker=worker,
        tier="disk",
        save=(4, "0"),
        leaves=frozenset("x"),
        run=run,
        is_trusted=is_trusted,
    )


DISKS: Mapping[str, PartialSnapshot | BadInput] = {
    "east/0": saved("east/0", "1111"),
    "west/0": saved("west/0", "2222"),
    "north/0": HELD,
    "south/0": saved("south/0", "2222", is_trusted=False),
}


class Disks:
    """A stand-in for the workers' answers: one refusal ends the round for all."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def on_disk(self, _: object, workers: Sequence[str], *__: object):
        self.asked.append(tuple(workers))
        answers = [DISKS[worker] for worker in workers]
        for answer in answers:
            if isinstance(answer, BadInput):
                raise answer
        return answers


@pytest.fixture
def disks(monkeypatch: pytest.MonkeyPatch) -> Disks:
    found = Disks()
    monkeypatch.setattr(recovery, "on_disk", found.on_disk)
    return found


def left(kind: str = "local-first", **more: Any) -> SurvivingState:
    storage = CheckpointStorage(directory="/scratch", run=OWN)
    context = SimpleNamespace(identify=lambda found: None, on_places=lambda *_: None)
    config = SimpleNamespace(storage=storage, recovery=kind, context=context)
    controller = SimpleNamespace(connections=None, workers=["east/0"])
    can_leave = {"leave": lambda node: True} | more
    context.identify = can_leave.pop("identify", context.identify)
    return SurvivingState(cast(Any, controller), cast(Any, config), **can_leave)


def test_nodes_whose_disk_is_another_runs_are_left_out_of_one_that_goes_on(
    disks: Disks,
):
    gone: list[str] = []
    state = left(leave=lambda node: not gone.append(node))
    with pytest.warns(UserWarning, match="continuing without node") as warned:
        assert state.joining([*DISKS]) == [DISKS["east/0"]]
    assert sorted(gone) == ["north", "south", "west"]
    said = [str(warning.message) for warning in warned]
    assert sum("2222" in text for text in said) == 3
    disks.asked.clear()
    assert state.on_disk([*DISKS]) == [DISKS["east/0"]]  # no other worker is asked
    assert disks.asked == [("east/0",)]


@pytest.mark.parametrize("worker", ["north/0", "west/0", "south/0"])
def test_a_run_that_cannot_go_on_without_such_a_node_ends(disks: Disks, worker: str):
    with pytest.raises(BadInput, match="2222"):
        left(leave=lambda node: False).joining(["east/0", worker])


def test_one_that_comes_again_is_asked_again(
    disks: Disks, monkeypatch: pytest.MonkeyPatch
):
    state = left()
    with pytest.warns(UserWarning, match="without node west"):
        state.joining(["west/0"])
    monkeypatch.setattr(f"{__name__}.DISKS", {"west/0": saved("west/0", "1111")})
    assert [one.worker for one in state.joining(["west/0"])] == ["west/0"]


@pytest.mark.parametrize("kind", ["local-first", "cloud-only"])
def test_disks_are_asked_whose_they_are_also_where_the_store_alone_counts(
    disks: Disks, kind: str
):
    seen: list[PartialSnapshot] = []
    state = left(kind, identify=seen.extend)
    used = [] if kind == "cloud-only" else [DISKS["east/0"]]
    assert state.found() == used and seen == [DISKS["east/0"]]
    assert state.joining(["east/0"]) == used
    assert disks.asked == [("east/0",)] * 2
