# SPDX-License-Identifier: Apache-2.0
"""Parts of a checkpoint that are gathered on the controller's machine.

Two workers have a part each on disks of their own. `tests/training/test_apart.py`
gathers those of a whole run.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hetjax.checkpoint.format import Entry, attempt
from hetjax.checkpoint.reader import Checkpoint, newest, steps
from hetjax.checkpoint.recovery_plan import Save
from hetjax.checkpoint.replication import GATHERER, PeerReplication
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.checkpoint.stores.store import StoreError
from hetjax.checkpoint.writer import CheckpointWriter
from hetjax.runtime.control import gathering
from hetjax.runtime.rpc.gathering_schema import SendPart
from hetjax.runtime.rpc.message import AnyRequest, Message
from hetjax.runtime.rpc.worker_connections import WorkerConnections, WorkerLost
from hetjax.runtime.worker.bootstrap import WorkerBootstrap
from hetjax.runtime.worker.service import HANDLERS, WorkerService

SECRET, WORKERS, STEP = b"secret", ("a", "b"), 4
SAVE: Save = (STEP, "0" * 15 + "1")


class Workers:
    """Services of workers, asked directly, and the folder in which parts are stored."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.home, self.disks = folder / "home", folder / "disk-{worker}"
        self.asked: list[str] = []
        gatherer = stack.enter_context(
            closing(PeerReplication(GATHERER, "127.0.0.1", SECRET, 2.0))
        )
        gatherer.store_in(self.home, keep=1)
        self.storage = CheckpointStorage(directory=str(self.home))
        self.services = {
            name: WorkerService(
                name, no_work, bootstrap=self.bootstrap(name, gatherer.address)
            )
            for name in WORKERS
        }
        for service in self.services.values():
            stack.callback(service.close)

    def bootstrap(self, name: str, gatherer: str) -> WorkerBootstrap:
        return WorkerBootstrap(
            worker=name,
            controller="",
            listen="127.0.0.1:0",
            secret=SECRET,
            silence_s=2.0,
            gatherer=gatherer,
        )

    def save(self, save: Save) -> None:
        for name in WORKERS:
            with CheckpointWriter(self.disk(name), name) as writer:
                writer.save(
                    save[0], [state(name)], host={"attempt": save[1]}, workers=WORKERS
                )

    def disk(self, name: str) -> Path:
        return Path(str(self.disks).replace("{worker}", name))

    def ask(self, requests: Mapping[str, AnyRequest]) -> dict[str, Message | None]:
        self.asked += [f"{type(r).__name__} {w}" for w, r in requests.items()]
        return {w: self._answer(w, request) for w, request in requests.items()}

    def _answer(self, name: str, request: Any) -> Message | None:
        """Answer on a machine on which the folder is another one than here."""
        there = CheckpointStorage(directory=str(self.disk(name)))
        fields = {k: v for k, v in vars(request).items() if k != "storage"}
        moved = type(request)(**fields, storage=there)
        return HANDLERS[type(request)](self.services[name], moved)

    def gather(self, step: int = STEP, also: Sequence[int] = ()) -> list[int]:
        """Return the sizes that were reported before anything was sent."""
        begun: list[int] = []

        def note(senders: Sequence[str], num_bytes: int) -> None:
            assert {*senders} <= {*WORKERS}
            begun.append(num_bytes)

        asked = cast(WorkerConnections, SimpleNamespace(ask=self.ask))
        gathering.gather(asked, WORKERS, self.storage, step, also, note)
        return begun


def no_work(settings: Any) -> Any:
    raise AssertionError("nothing is trained here")


def state(name: str) -> tuple[Entry, np.ndarray]:
    entry = Entry(f"params.{name}", (4, 8), np.dtype(np.float32), (1, 4))
    rng = np.random.default_rng(WORKERS.index(name))
    return entry, rng.standard_normal(entry.shape, np.float32)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with ExitStack() as stack:
        found = Workers(tmp_path, stack)
        found.save(SAVE)
        yield found


def found_in(folder: Path) -> dict[str, np.ndarray]:
    whole = Checkpoint.open(folder, STEP)
    assert attempt(whole.host) == SAVE[1]
    return {name: whole.read(state(name)[0]) for name in WORKERS}


def check_is_whole(folder: Path) -> None:
    for name, value in found_in(folder).items():
        np.testing.assert_array_equal(value, state(name)[1])


def test_parts_on_several_disks_are_one_checkpoint_where_they_are_gathered(
    workers: Workers,
):
    files = [p for w in WORKERS for p in workers.disk(w).rglob("state/**/*")]
    (size,) = workers.gather()
    assert size == sum(path.stat().st_size for path in files if path.is_file())
    check_is_whole(workers.home)


def test_what_is_there_already_is_not_sent_again(workers: Workers):
    part = f"step_{STEP:08d}/a"
    shutil.copytree(workers.disk("a") / part, workers.home / part)
    workers.gather()
    assert workers.asked == ["TellPartSize a", "TellPartSize b", "SendPart b"]
    check_is_whole(workers.home)
    workers.asked.clear()
    assert not workers.gather()
    assert not any("SendPart" in asked for asked in workers.asked)


def test_another_save_of_the_step_is_replaced(workers: Workers):
    workers.gather()
    for name in WORKERS:
        shutil.rmtree(workers.disk(name))
    again = STEP, "0" * 15 + "2"
    workers.save(again)
    assert workers.gather()
    assert attempt(Checkpoint.open(workers.home, STEP).host) == again[1]


def test_the_best_stays_beside_the_last_and_others_go(workers: Workers):
    workers.gather()
    for step in (STEP + 2, STEP + 4):
        workers.save((step, SAVE[1]))
        workers.gather(step, also=[STEP])
    assert steps(workers.home) == [STEP, STEP + 4]
    check_is_whole(workers.home)


def test_a_step_of_which_a_lost_machine_has_a_part_does_not_stay(workers: Workers):
    shutil.rmtree(workers.disk("b"))
    with pytest.raises(StoreError, match="machines that left have parts"):
        workers.gather()
    assert not [*workers.home.glob("step_*/*")]


def test_nothing_is_sent_where_there_is_no_room(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
):
    free = SimpleNamespace(free=gathering._LEFT_FREE)
    monkeypatch.setattr(gathering.shutil, "disk_usage", lambda path: free)
    with pytest.raises(StoreError, match="takes [0-9,]* bytes.*1,073,741,824 free"):
        workers.gather()
    assert not any("SendPart" in asked for asked in workers.asked)


def test_half_a_checkpoint_is_removed_where_a_worker_cannot_send_its_part(
    workers: Workers,
):
    gone = workers.disk("b") / f"step_{STEP:08d}/b/state"
    shutil.rmtree(gone)
    with pytest.raises(StoreError, match="b failed: "):
        workers.gather()
    assert newest(workers.home) is None


def test_half_a_checkpoint_is_removed_where_a_worker_is_lost(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
):
    answer = workers._answer

    def lose(name: str, request: Any) -> Message | None:
        if name == "b" and isinstance(request, SendPart):
            assert (workers.home / f"step_{STEP:08d}/a").exists()
            raise WorkerLost("b", "ended")
        return answer(name, request)

    monkeypatch.setattr(workers, "_answer", lose)
    with pytest.raises(WorkerLost):
        workers.gather()
    assert not [*workers.home.glob("step_*/*")]
