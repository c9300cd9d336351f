# SPDX-License-Identifier: Apache-2.0
"""Saves of several runs in one folder, one store, one peer: each run has its own."""

import errno
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

import hetjax.checkpoint.storage as storage_room
from hetjax.checkpoint.fetching import StoredStep, fetch_newest
from hetjax.checkpoint.format import (
    MANIFEST,
    AttemptNames,
    attempt,
    from_text,
    start_of,
    to_text,
)
from hetjax.checkpoint.leases.lease import (
    Fence,
    LeaseHeld,
    LeaseLost,
    acquire,
    holder_of,
    last_number,
)
from hetjax.checkpoint.leases.lease_holder import Holder
from hetjax.checkpoint.reader import Checkpoint, partial_checkpoints, steps
from hetjax.checkpoint.replication import PeerReplication
from hetjax.checkpoint.run_identity import RunIdentity
from hetjax.checkpoint.signing import NotSigned
from hetjax.checkpoint.storage import LEASES, CheckpointStorage, lease_folder
from hetjax.checkpoint.stored_steps import (
    COMMIT,
    committed_run,
    committed_steps,
    in_store,
    manifests,
    object_name,
)
from hetjax.checkpoint.stores.local import FileStore
from hetjax.checkpoint.stores.store import CorruptData, StoreError
from hetjax.checkpoint.uploader import Uploader
from hetjax.checkpoint.writer import CheckpointWriter
from hetjax.errors import BadInput
from hetjax.runtime.worker.state_inventory import StateInventory
from tests.checkpoint.test_hostile_names import manifest
from tests.checkpoint.values import state_of

ONE, TWO = RunIdentity(id="1111"), RunIdentity(id="2222")
OLDER = RunIdentity(id="before-1111")
ATTEMPT = {"attempt": f"{1 << 32:016x}"}  # both: first start, first save


def save(
    directory: Path, worker: str, step: int, run: RunIdentity | None, **more: Any
) -> None:
    with CheckpointWriter(directory, worker, keep=9, run=run, **more) as writer:
        writer.save(step, state_of(step), host=ATTEMPT)


def test_parts_of_two_runs_are_no_step_together(tmp_path: Path):
    """Step, attempt and workers are the same; each run lacks one worker's part."""
    for worker, run in (("a", ONE), ("b", TWO)):
        with CheckpointWriter(tmp_path, worker, run=run) as writer:
            writer.save(4, state_of(4), host=ATTEMPT, workers=["a", "b"])
    assert steps(tmp_path) == steps(tmp_path, run=ONE) == []
    found = {one.run: one.absent for one in partial_checkpoints(tmp_path)}
    assert found == {"1111": {"b"}, "2222": {"a"}}


def test_of_steps_of_two_runs_each_reads_its_own(tmp_path: Path):
    save(tmp_path, "a", 2, ONE)
    save(tmp_path, "b", 4, TWO)
    save(tmp_path, "c", 6, None)
    assert steps(tmp_path) == [2, 4, 6]
    for run, own in ((ONE, [2]), (TWO, [4]), (OLDER, [6])):
        assert steps(tmp_path, run=run) == own
        assert Checkpoint.open(tmp_path, run=run).step == own[0]
    with pytest.raises(BadInput, match="no complete checkpoint of step 4") as refused:
        Checkpoint.open(tmp_path, 4, run=ONE)
    assert refused.value.allowed == "complete steps there: 2"


def test_steps_that_are_not_signed_with_the_key_are_not_offered(tmp_path: Path):
    key = bytes(range(32))
    for step, signed_with in ((2, key), (4, None), (6, bytes(32))):
        save(tmp_path, "a", step, ONE, key=signed_with)
    with pytest.raises(BadInput, match="no complete checkpoint of step 8") as refused:
        Checkpoint.open(tmp_path, 8, key=key)
    assert refused.value.allowed == "complete steps there: 2"


@pytest.mark.parametrize("before", [TWO, None])
def test_nothing_of_another_run_is_written_over(
    tmp_path: Path, before: RunIdentity | None
):
    save(tmp_path, "a", 2, before)
    kept = (tmp_path / "step_00000002/a" / MANIFEST).read_bytes()
    with pytest.raises(BadInput, match=r"holds step 2 of .*; this is run 1111"):
        CheckpointWriter(tmp_path, "a", run=ONE)
    assert (tmp_path / "step_00000002/a" / MANIFEST).read_bytes() == kept
    if before is None:
        save(tmp_path, "a", 4, OLDER)  # its own, from before it had an identity
        assert steps(tmp_path, run=OLDER) == [2, 4]


def test_in_a_store_each_reads_its_own_and_removes_none_of_the_other(tmp_path: Path):
    store = FileStore(tmp_path / "store", pause_s=0.0)
    for folder, step, run in (("one", 2, ONE), ("two", 4, TWO)):
        with Uploader(store, tmp_path / folder, "a" + folder) as uploader:
            save(tmp_path / folder, "a" + folder, step, run, uploader=uploader)
            assert uploader.wait(30)
    assert committed_steps(store) == [2, 4]
    assert [committed_steps(store, run) for run in (ONE, TWO)] == [[2], [4]]
    assert {one.run: one.save[0] for one in in_store(store)} == {"1111": 2, "2222": 4}
    fetched = fetch_newest(store, tmp_path / "there", run=ONE)
    assert fetched is not None and fetched.step == 2
    with pytest.raises(CorruptData, match="step 4 belongs to another run"):
        StoredStep(store, 4, tmp_path / "there", run=ONE)
    # a later lease suffices only to replace a step of the same run
    fence = Fence(store, "it", 0)
    late = replace(fence, number=9)
    late_uploader = Uploader(store, tmp_path / "late", "atwo", fence=late, run=ONE)
    with late_uploader, pytest.warns(UserWarning, match="was not uploaded"):
        save(tmp_path / "late", "atwo", 4, ONE, uploader=late_uploader)
        assert late_uploader.wait(30)
    assert committed_run(store, 4) == "2222"


@pytest.mark.parametrize("other", [TWO, None])
def test_a_run_with_a_key_removes_nothing_of_one_that_it_cannot_read(
    tmp_path: Path, other: RunIdentity | None
):
    """Neither when it retains its newest steps, nor when it discards some."""
    store, key = FileStore(tmp_path / "store", pause_s=0.0), bytes(range(32))
    for step in (2, 5, 8):
        uploader = Uploader(store, tmp_path / "other", "a", keep=9)
        save(tmp_path / "other", "a", step, other, uploader=uploader)
    assert committed_steps(store) == [2, 5, 8]
    for step in (1, 3, 6, 7):
        uploader = Uploader(store, tmp_path / "own", "a", keep=1, key=key, run=ONE)
        save(tmp_path / "own", "a", step, ONE, uploader=uploader, key=key)
        assert committed_steps(store, ONE) == [step]
    with Uploader(store, tmp_path / "own", "a", key=key, run=ONE) as uploader:
        uploader.discard_after(4)
    assert committed_steps(store) == [2, 5, 8]
    assert [len(manifests(store, step)) for step in (2, 5, 8)] == [1, 1, 1]


def test_who_gives_steps_up_leaves_those_of_other_runs_on_the_disk(tmp_path: Path):
    save(tmp_path, "a", 8, TWO)
    with CheckpointWriter(tmp_path, "b", run=ONE, key=bytes(range(32))) as writer:
        writer.save(6, state_of(6), host=ATTEMPT)
        writer.discard_after(4)
    assert steps(tmp_path) == [8]


def test_a_worker_names_saves_that_its_key_does_not_open(tmp_path: Path):
    key = bytes(range(32))
    save(tmp_path, "a", 2, TWO)
    save(tmp_path, "b", 4, ONE, key=key)
    with pytest.warns(UserWarning, match="not trusted"):
        told = [*StateInventory().look(tmp_path, {}, key, ONE)]
    found = {one.run: (one.save[0], one.is_trusted) for one in told}
    assert found == {"1111": (4, True), "2222": (2, False)}


def test_a_commit_vouches_for_manifests_of_its_run_alone(tmp_path: Path):
    store = FileStore(tmp_path / "store", pause_s=0.0)
    with Uploader(store, tmp_path / "one", "a") as uploader:
        save(tmp_path / "one", "a", 2, ONE, uploader=uploader)
        assert uploader.wait(30)
    name = object_name(2, COMMIT)
    body = json.loads(store.get_text(name) or "")
    assert body["run"] == "1111"
    for other in ("2222", "", 7):
        store.remove([name])
        store.put_text(name, json.dumps(body | {"run": other}))
        why = "run = 7" if other == 7 else "belongs to another run than its COMMIT"
        with pytest.raises(CorruptData, match=why):
            manifests(store, 2)


def test_the_identity_is_signed(tmp_path: Path):
    key = bytes(range(32))
    save(tmp_path, "a", 2, ONE, key=key)
    text = (tmp_path / "step_00000002/a" / MANIFEST).read_text()
    assert from_text(text, key).run == "1111"
    forged = json.loads(to_text(replace(from_text(text), run="2222")))
    forged["signature"] = json.loads(text)["signature"]
    assert from_text(json.dumps(forged)).run == "2222"  # all else about it is right
    with pytest.raises(NotSigned):
        from_text(json.dumps(forged), key)


def test_a_peer_keeps_no_copies_of_another_run(tmp_path: Path):
    with ExitStack() as stack:
        ends = [PeerReplication(name, "127.0.0.1", b"secret") for name in "ab"]
        for end in ends:
            stack.callback(end.close)
        a, b = ends
        a.send_to({"b": b.address})
        b.store_in(tmp_path / "b", 2, TWO)
        save(tmp_path / "a", "a", 2, ONE)
        with pytest.raises(StoreError, match="no copy of step 2"):
            a.replicate(tmp_path / "a/step_00000002/a", 2)
        assert steps(tmp_path / "b") == []
        b.store_in(tmp_path / "b", 2, ONE)
        a.replicate(tmp_path / "a/step_00000002/a", 2)
        assert steps(tmp_path / "b", run=ONE) == [2]


def held(folder: Path, home: str, run: RunIdentity, worker: str = "a"):
    storage = CheckpointStorage(
        directory=str(folder), run=run, home=home, is_local=True
    )
    lease = storage.hold(worker)
    assert lease is not None
    return lease


def test_one_run_at_a_time_has_a_folder_whatever_its_workers_are_called(
    tmp_path: Path,
):
    first = held(tmp_path, "here 1 /one", ONE)
    for worker in ("a", "b"):
        with pytest.raises(LeaseHeld, match=r"checkpoint folder .*\(run 1111\)"):
            held(tmp_path, "here 2 /two", TWO, worker)
        with pytest.raises(LeaseHeld, match=r"checkpoint folder .*\(run 1111\)"):
            held(tmp_path, "here 2 /copy", ONE, worker)  # a copy is another one, too
    others = held(tmp_path, "here 1 /one", ONE, "b")
    again = held(tmp_path, "here 1 /one", ONE)  # the worker restarted
    assert first.fence.number < again.fence.number
    for lease in (first, others, again):
        lease.release()
    held(tmp_path, "here 2 /two", TWO).release()


GONE = Holder(
    token="x", host="h", pid=5, machine="m", started="1", run="1111", home="h 7 /was"
)


def crashed(folder: Path, worker: str) -> Fence:
    """Return the fence of a worker on another machine; the run's directory moved."""
    store = lease_folder(folder / LEASES / worker)
    store.put_text("lease/0000000001/holder", json.dumps(asdict(GONE)))
    return Fence(store, "it", 1)


def soon(patched: pytest.MonkeyPatch, waits: Callable[[str], object]) -> None:
    patched.setattr(storage_room, "acquire", partial(acquire, lease_s=0.3))
    patched.setattr(storage_room, "_warn", waits)


def test_leases_of_workers_that_crashed_are_awaited_together_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fences = [crashed(tmp_path, f"old-{n}") for n in range(3)]
    together, waits = Barrier(3), []

    def wait(text: str) -> None:
        waits.append(text)
        together.wait(20)  # breaks unless all are waited for at once

    soon(monkeypatch, wait)
    for _ in range(2):
        held(tmp_path, "h 8 /moved", ONE).release()
    assert len(waits) == 3
    for fence in fences:
        with pytest.raises(LeaseLost):  # it may wake up, but saves nothing
            fence.check()


def test_a_worker_has_its_folder_though_another_has_ended_the_old_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Both wait for the same lease, and another worker ends it first."""
    store, ours = crashed(tmp_path, "a").store, replace(GONE, home="h 8 /moved")
    faster = "lease/0000000002/holder", json.dumps(asdict(ours))
    soon(monkeypatch, lambda text: store.put_text(*faster))
    lease = held(tmp_path, "h 8 /moved", ONE)
    assert lease.number == 3
    lease.release()
    crashed(tmp_path, "b")
    store = lease_folder(tmp_path / LEASES / "b")
    held(tmp_path, "h 8 /moved", ONE).release()
    assert last_number(store) == 2  # that worker has it


def test_a_folder_within_the_run_directory_has_no_lease_of_its_own(tmp_path: Path):
    storage = CheckpointStorage(directory=str(tmp_path), run=ONE, home="here 1 /one")
    assert storage.hold("a") is None and not (tmp_path / LEASES).exists()


@pytest.mark.parametrize("code", [errno.ENOTDIR, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"cannot be used \(Not a directory") as refused:
        held(tmp_path / "file/a", "here 1 /one", ONE)
    assert "--checkpoint.local" in refused.value.fix
    _fail_to_write(monkeypatch, code)  # below a writable folder
    with pytest.raises(BadInput, match=rf"cannot be used \({os.strerror(code)}"):
        held(tmp_path, "here 1 /one", ONE)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_has_no_lease_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    _fail_to_write(monkeypatch, code)
    storage = CheckpointStorage(
        directory=str(tmp_path), run=ONE, home="here 1 /one", is_local=True
    )
    with pytest.warns(UserWarning, match=f"could not be leased, .*{os.strerror(code)}"):
        assert storage.hold("a") is None


def _fail_to_write(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(store: FileStore, name: str, text: str) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(FileStore, "put_text", fail)


def test_a_worker_whose_folder_was_taken_over_saves_nothing(tmp_path: Path):
    first = held(tmp_path, "here 1 /one", ONE)
    storage = CheckpointStorage(
        directory=str(tmp_path), run=ONE, home="here 1 /one", is_local=True
    )
    with storage.writer("a", held=first) as writer:
        lease_folder(tmp_path / LEASES / "a").put_text("lease/0000000002/holder", "")
        with pytest.warns(UserWarning, match="not saved .*checkpoint folder"):
            writer.save(1, state_of(1), host=ATTEMPT)
            writer.wait()
    assert steps(tmp_path) == []
    first.release()


def test_bytes_that_are_swapped_after_their_check_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An attacker with write access waits for the check, then replaces the bytes."""
    key = bytes(range(32))
    save(tmp_path, "a", 2, ONE, key=key)
    found = Checkpoint.open(tmp_path, key=key)
    opened, swapped = os.open, set[Path]()

    def open_and_swap(path: Any, *more: Any, **named: Any) -> int:
        """Open a file, then replace it: later opens find zeros."""
        descriptor = opened(path, *more, **named)
        if "state" in Path(path).parts:
            num_bytes = os.fstat(descriptor).st_size
            os.unlink(path)
            Path(path).write_bytes(bytes(num_bytes))
            swapped.add(Path(path))
        return descriptor

    monkeypatch.setattr(os, "open", open_and_swap)
    for entry, value in state_of(2):
        np.testing.assert_array_equal(found.read(entry), value)
    assert swapped >= {path for leaf in found.leaves.values() for path in leaf.files}


@pytest.mark.parametrize("wrong", [{"home": 5}, {"run": ["a"]}, {"pid": "1"}])
def test_a_holder_with_fields_of_other_types_is_none(tmp_path: Path, wrong: dict):
    store = lease_folder(tmp_path)
    acquire(store, "it").release()
    name = "lease/0000000001/holder"
    text = store.get_text(name) or ""
    assert holder_of(store, 1) is not None
    store.remove([name])
    store.put_text(name, json.dumps(json.loads(text) | wrong))
    assert holder_of(store, 1) is None


@pytest.mark.parametrize("run", ["a b", "../x", 7, "a" * 99])
def test_what_cannot_be_an_identity_damages_a_manifest(run: object):
    body = to_text(manifest())
    why = "run = 7" if run == 7 else "is not a run identity"
    with pytest.raises(ValueError, match=why):
        from_text(to_text(replace(from_text(body), run=run)))  # type: ignore[arg-type]


@pytest.mark.parametrize("start", [2**31, 2**32 - 1])
def test_a_start_after_which_none_can_follow_damages_a_manifest(start: int):
    def text(start: int) -> str:
        host = {"attempt": AttemptNames(start).new()}
        return to_text(replace(manifest(), host=host))

    last = start_of(attempt(from_text(text(2**31 - 1)).host))
    assert start_of(AttemptNames(2 * last).new()) == 2 * last
    with pytest.raises(ValueError, match="has an impossible start number"):
        from_text(text(start))


def test_a_lease_says_again_who_holds_it(tmp_path: Path):
    store = lease_folder(tmp_path)
    with acquire(store, "it") as lease:
        name = "lease/0000000001/holder"
        text = store.get_text(name)
        store.remove([name])
        lease.assert_again()
        assert store.get_text(name) == text
