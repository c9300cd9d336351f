# SPDX-License-Identifier: Apache-2.0
import random
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hetjax.checkpoint.file_records import FileRecord, record_of_file
from hetjax.checkpoint.format import Manifest, to_text
from hetjax.checkpoint.stored_steps import (
    commit,
    committed_steps,
    manifests,
    object_name,
)
from hetjax.checkpoint.stores.local import FileStore
from hetjax.checkpoint.stores.store import (
    CorruptData,
    Store,
    StoreError,
)
from hetjax.checkpoint.uploader import Uploader
from tests.checkpoint.faulty_server import Fault, FaultyServer

LONG_S = 30.0


@dataclass
class Watched:
    """A store that stops before each `put` of a step until that step is let through.

    `meanwhile` runs once, right after a COMMIT is written.
    """

    store: Store
    held: dict[str, threading.Event] = field(default_factory=dict)
    reached: threading.Event = field(default_factory=threading.Event)
    meanwhile: list = field(default_factory=list)

    def put(self, name: str, path: Path, record: FileRecord) -> None:
        if gate := self.held.get(name.split("/")[0]):
            self.reached.set()
            assert gate.wait(LONG_S)
        self.store.put(name, path, record)

    def put_text(self, name: str, text: str) -> None:
        self.store.put_text(name, text)
        if name.endswith("COMMIT") and self.meanwhile:
            self.meanwhile.pop()()

    def get(self, name: str, path: Path, record: FileRecord) -> None:
        self.store.get(name, path, record)

    def get_text(self, name: str) -> str | None:
        return self.store.get_text(name)

    def names(self, prefix: str) -> list[str]:
        return self.store.names(prefix)

    def written_s(self, name: str) -> float:
        return self.store.written_s(name)

    def remove(self, names: Iterable[str]) -> None:
        self.store.remove(names)

    def __post_init__(self) -> None:
        self.limit = self.store.limit


def save(
    directory: Path,
    step: int,
    worker: str = "a",
    workers: tuple[str, ...] = ("a",),
    seed: int = 0,
) -> Manifest:
    """Write one worker's local part of a step, as after its commit."""
    own, files = directory / f"step_{step:08d}" / worker, {}
    dice = random.Random(f"{step} {worker} {seed}")
    for name in ("state/_METADATA", "state/p.w.0of2/c.0.0", "state/p.w.1of2/c.0.0"):
        path = own / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(dice.randbytes(2000))
        files[name] = record_of_file(path)
    manifest = Manifest(
        step=step,
        worker=worker,
        workers=workers,
        state="state",
        entries=(),
        files=files,
        host={"seed": seed},
    )
    (own / "manifest.json").write_text(to_text(manifest))
    return manifest


def upload(uploader: Uploader, *steps: int) -> None:
    for step in steps:
        uploader.enqueue(step)
        assert uploader.wait(LONG_S)


@contextmanager
def _uploading_the_first_of(
    *steps: int, folder: Path
) -> Iterator[tuple[Uploader, Watched, threading.Event]]:
    """Save steps; yield an uploader whose first upload waits for the event."""
    for step in steps:
        save(folder, step)
    gate, first = threading.Event(), object_name(steps[0])
    store = Watched(FileStore(folder / "store"), {first: gate})
    with Uploader(store, folder, "a") as uploader:
        uploader.enqueue(steps[0])
        assert store.reached.wait(LONG_S)
        yield uploader, store, gate


def steps_with_files(store: Store, worker: str = "a") -> set[int]:
    names = [name.split("/") for name in store.names("")]
    return {int(name[0][5:]) for name in names if name[1] == worker}


def test_a_step_is_stored_whole_and_committed(store: Store, tmp_path: Path) -> None:
    manifest = save(tmp_path, 10)
    with Uploader(store, tmp_path, "a") as uploader:
        upload(uploader, 10)
        assert uploader.in_flight == frozenset()
    assert committed_steps(store) == [10]
    assert manifests(store, 10) == [manifest]
    for name, expected in manifest.files.items():
        store.get(f"step_00000010/a/{name}", tmp_path / "got", expected)
        local = tmp_path / "step_00000010/a" / name
        assert (tmp_path / "got").read_bytes() == local.read_bytes()


def test_the_manifest_follows_the_files_and_commit_follows_the_manifest(
    cloud: FaultyServer, bucket: Store, tmp_path: Path
) -> None:
    save(tmp_path, 10)
    with Uploader(bucket, tmp_path, "a") as uploader:
        upload(uploader, 10)
    generations = {n: found.generation for n, found in cloud.buckets["bucket"].items()}
    *_, last_but_one, last = sorted(generations, key=generations.__getitem__)
    assert last_but_one == "run/step_00000010/a/manifest.json"
    assert last == "run/step_00000010/COMMIT"


def test_a_step_is_committed_only_once_all_its_workers_are_there(
    store: Store, tmp_path: Path
) -> None:
    both = ("a", "b")
    saved = [save(tmp_path, 10, worker, both) for worker in both]
    for worker, expected in (("a", []), ("b", [10])):
        with Uploader(store, tmp_path, worker) as uploader:
            upload(uploader, 10)
        assert committed_steps(store) == expected
    assert manifests(store, 10) == saved


def test_a_step_without_commit_has_no_manifests(store: Store) -> None:
    with pytest.raises(FileNotFoundError, match="step 10 has no COMMIT"):
        manifests(store, 10)


def test_workers_that_upload_at_once_make_one_commit(
    cloud: FaultyServer, bucket: Store, tmp_path: Path
) -> None:
    workers = ("a", "b", "c", "d")
    saved = [save(tmp_path, 10, worker, workers) for worker in workers]
    uploaders = [Uploader(bucket, tmp_path, worker) for worker in workers]
    for uploader in uploaders:
        uploader.enqueue(10)
    for uploader in uploaders:
        assert uploader.wait(LONG_S)
        uploader.close()
    assert manifests(bucket, 10) == saved
    made = [found.generation for found in cloud.buckets["bucket"].values()]
    assert max(made) == len(made) == 4 * 4 + 1  # nothing was created twice


def test_a_step_that_fails_warns_once_and_leaves_the_one_before(
    cloud: FaultyServer, bucket: Store, tmp_path: Path
) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    with Uploader(bucket, tmp_path, "a") as uploader:
        upload(uploader, 10)
        cloud.fault = lambda *_: 503
        with pytest.warns(match="step 20 was not uploaded to ..://bucket/run") as told:
            upload(uploader, 20)
        assert len(told) == 1
        assert "tried 10 times" in str(told[0].message)
        assert "training continues" in str(told[0].message)
        cloud.fault = lambda *_: None
        assert committed_steps(bucket) == [10]
        upload(uploader, 30)
    assert committed_steps(bucket) == [10, 30]


def test_a_step_whose_local_file_is_rotten_is_not_committed(
    store: Store, tmp_path: Path
) -> None:
    save(tmp_path, 10)
    (tmp_path / "step_00000010/a/state/p.w.1of2/c.0.0").write_bytes(bytes(2000))
    with Uploader(store, tmp_path, "a") as uploader:
        with pytest.warns(match="step 10 was not uploaded .*CorruptData: .*crc32c"):
            upload(uploader, 10)
    assert committed_steps(store) == []
    assert "step_00000010/a/manifest.json" not in store.names("")


def test_steps_that_are_overtaken_while_they_wait_are_skipped(tmp_path: Path) -> None:
    with _uploading_the_first_of(10, 20, 30, folder=tmp_path) as (
        uploader,
        store,
        gate,
    ):
        uploader.enqueue(20)
        assert uploader.in_flight == {10, 20}
        uploader.enqueue(30)
        assert uploader.in_flight == {10, 30}
        assert not uploader.wait(0.0)
        gate.set()
        assert uploader.wait(LONG_S)
    assert committed_steps(store) == [10, 30]
    assert steps_with_files(store) == {10, 30}


def test_only_the_newest_committed_steps_stay(store: Store, tmp_path: Path) -> None:
    with Uploader(store, tmp_path, "a", keep=2) as uploader:
        for step in (10, 20, 30, 40):
            save(tmp_path, step)
            upload(uploader, step)
            kept = [s for s in (step - 10, step) if s]
            assert committed_steps(store) == kept
            assert steps_with_files(store) == set(kept)


@pytest.mark.parametrize("safe", [20, 25])
def test_the_newest_step_that_the_run_may_go_back_to_stays(
    store: Store, tmp_path: Path, safe: int
) -> None:
    with Uploader(store, tmp_path, "a", keep=1) as uploader:
        uploader.keep_also(None, safe)
        for step in (10, 20, 30, 40):
            save(tmp_path, step)
            upload(uploader, step)
        assert committed_steps(store) == [20, 40]
        uploader.discard_after(safe)
    assert committed_steps(store) == [20]


def test_a_step_stays_until_a_newer_one_is_committed(
    store: Store, tmp_path: Path
) -> None:
    both = ("a", "b")
    for step in (10, 20, 30):
        for worker in both:
            save(tmp_path, step, worker, both)
    a = Uploader(store, tmp_path, "a", keep=1)
    b = Uploader(store, tmp_path, "b", keep=1)
    upload(a, 10)
    upload(b, 10)
    upload(a, 20, 30)
    assert committed_steps(store) == [10]
    assert steps_with_files(store, "a") == {10, 20, 30}
    upload(b, 30)
    assert committed_steps(store) == [30]
    assert steps_with_files(store, "a") == {10, 20, 30}  # b removes only its own
    assert steps_with_files(store, "b") == {30}
    save(tmp_path, 40, "a", both)
    upload(a, 40)
    assert steps_with_files(store, "a") == {30, 40}
    a.close()
    b.close()


def test_commit_is_removed_before_what_it_vouches_for(
    cloud: FaultyServer, bucket: Store, tmp_path: Path
) -> None:
    with Uploader(bucket, tmp_path, "a", keep=1) as uploader:
        for step in (10, 20):
            save(tmp_path, step)
            upload(uploader, step)
    removed = [r.path for r in cloud.log if r.method == "DELETE" and r.status == 204]
    prefix = cloud.path("run/step_00000010")
    assert removed[:2] == [f"{prefix}/COMMIT", f"{prefix}/a/manifest.json"]
    assert len(set(removed)) == 2 + 3


def test_going_back_gives_up_the_later_steps_once_a_new_one_is_committed(
    store: Store, tmp_path: Path
) -> None:
    both = ("a", "b")
    for step in (10, 20, 30):
        for worker in both:
            save(tmp_path, step, worker, both)
            with Uploader(store, tmp_path, worker, keep=3) as uploader:
                upload(uploader, step)
    a = Uploader(store, tmp_path, "a", keep=3)
    b = Uploader(store, tmp_path, "b", keep=3)
    for worker in both:
        save(tmp_path, 15, worker, both)
    upload(a, 15)
    assert committed_steps(store) == [10, 20, 30]
    upload(b, 15)
    assert committed_steps(store) == [10, 15]
    assert steps_with_files(store, "b") == {10, 15}
    a.close()
    b.close()


def test_what_is_given_up_is_not_committed_in_the_store_any_more(
    store: Store, tmp_path: Path
) -> None:
    with Uploader(store, tmp_path, "a", keep=3) as uploader:
        for step in (10, 20, 30):
            save(tmp_path, step)
            upload(uploader, step)
        uploader.discard_after(10)
        assert committed_steps(store) == [10]
        save(tmp_path, 20, seed=2)
        upload(uploader, 20)
        assert committed_steps(store) == [10, 20]


def test_what_is_given_up_on_its_way_to_the_store_does_not_count_there(
    tmp_path: Path,
) -> None:
    with _uploading_the_first_of(10, 20, folder=tmp_path) as (uploader, store, gate):
        uploader.enqueue(20)
        uploader.discard_after(0)
        gate.set()
        assert uploader.wait(LONG_S)
    assert committed_steps(store) == []


def test_remains_of_a_run_that_was_given_up_are_replaced(
    store: Store, tmp_path: Path
) -> None:
    both = ("a", "b")
    save(tmp_path, 10, "a", both, seed=1)
    with Uploader(store, tmp_path, "a") as uploader:
        upload(uploader, 10)
    saved = [save(tmp_path, 10, worker, both, seed=2) for worker in both]
    for worker in both:
        with Uploader(store, tmp_path, worker) as uploader:
            upload(uploader, 10)
    assert manifests(store, 10) == saved
    for name, expected in saved[0].files.items():
        store.get(f"step_00000010/a/{name}", tmp_path / "got", expected)


def test_a_committed_step_is_never_replaced(store: Store, tmp_path: Path) -> None:
    first = save(tmp_path, 10, seed=1)
    with Uploader(store, tmp_path, "a") as uploader:
        upload(uploader, 10)
        save(tmp_path, 10, seed=2)
        with pytest.warns(match="step 10 was not uploaded .*already exists"):
            upload(uploader, 10)
    assert manifests(store, 10) == [first]


def test_a_manifest_of_another_set_of_workers_does_not_count(
    store: Store, tmp_path: Path
) -> None:
    save(tmp_path, 10, "a", ("a", "c"))
    with Uploader(store, tmp_path, "a") as uploader:
        upload(uploader, 10)
    save(tmp_path, 10, "b", ("a", "b"))
    with Uploader(store, tmp_path, "b") as uploader:
        upload(uploader, 10)
    assert committed_steps(store) == []


def test_a_manifest_that_is_damaged_in_the_store_is_told(
    store: Store, tmp_path: Path
) -> None:
    store.put_text("step_00000010/b/manifest.json", "{}")
    save(tmp_path, 10, "a", ("a", "b"))
    with Uploader(store, tmp_path, "a") as uploader:
        with pytest.warns(match="10/b/manifest.json cannot be used"):
            upload(uploader, 10)
    assert committed_steps(store) == []


def test_a_manifest_changed_after_the_commit_is_told(
    store: Store, tmp_path: Path
) -> None:
    save(tmp_path, 10, seed=1)
    with Uploader(store, tmp_path, "a") as uploader:
        upload(uploader, 10)
    store.remove(["step_00000010/a/manifest.json"])
    with pytest.raises(CorruptData, match="a/manifest.json is not the one"):
        manifests(store, 10)
    other = to_text(save(tmp_path, 10, seed=2))
    store.put_text("step_00000010/a/manifest.json", other)
    with pytest.raises(CorruptData, match="a/manifest.json is not the one"):
        manifests(store, 10)


def test_commit_does_not_stay_where_a_worker_takes_its_part_away_meanwhile(
    tmp_path: Path,
) -> None:
    inner = FileStore(tmp_path / "store")
    store = Watched(inner)
    store.meanwhile.append(lambda: inner.remove(["step_00000010/b/manifest.json"]))
    for worker in ("a", "b"):
        manifest = to_text(save(tmp_path, 10, worker, ("a", "b")))
        inner.put_text(f"step_00000010/{worker}/manifest.json", manifest)
    commit(store, 10, ("a", "b"))
    assert store.meanwhile == [] and committed_steps(store) == []
    inner.put_text("step_00000010/b/manifest.json", manifest)
    commit(store, 10, ("a", "b"))
    assert committed_steps(store) == [10]


def test_old_steps_that_cannot_be_removed_are_told_and_do_no_harm(
    cloud: FaultyServer, bucket: Store, tmp_path: Path
) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    cloud.fault = lambda method, *_: 403 if method == "DELETE" else None
    with Uploader(bucket, tmp_path, "a", keep=1) as uploader:
        upload(uploader, 10)
        with pytest.warns(match="old checkpoints in ..://bucket/run were not removed"):
            upload(uploader, 20)
    assert committed_steps(bucket) == [10, 20]


def test_closing_tells_what_was_not_uploaded(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    gate = threading.Event()
    store = Watched(FileStore(tmp_path / "store"), {"step_00000010": gate})
    uploader = Uploader(store, tmp_path, "a", num_threads=1)
    uploader.enqueue(10)
    assert store.reached.wait(LONG_S)
    uploader.enqueue(20)
    threading.Timer(0.05, gate.set).start()
    with pytest.warns(UserWarning, match="the run ended") as told:
        uploader.close()
    lost = {str(warning.message).split()[3] for warning in told}
    assert lost == {"10", "20"} and len(told) == 2
    assert committed_steps(store) == []


def test_warnings_made_errors_do_not_stop_the_uploader(tmp_path: Path) -> None:
    save(tmp_path, 20)
    store = FileStore(tmp_path / "store")
    with warnings.catch_warnings(), Uploader(store, tmp_path, "a") as uploader:
        warnings.simplefilter("error")
        upload(uploader, 10, 20)  # 10 was never saved
    assert committed_steps(store) == [20]


def test_a_store_full_of_faults_commits_every_step_whole(
    cloud: FaultyServer, bucket: Store, tmp_path: Path
) -> None:
    dice, lock = random.Random(4), threading.Lock()
    kinds: list[Fault] = [503, "reset", "lose reply", ("truncate", 9), ("corrupt", 2)]

    def fault(*_: object) -> Fault:
        with lock:
            return dice.choice(kinds) if dice.random() < 0.2 else None

    workers = ("a", "b")
    uploaders = [Uploader(bucket, tmp_path, w, keep=3) for w in workers]
    cloud.fault = fault
    saved: dict[int, list[Manifest]] = {}
    for step in (10, 20, 30):
        saved[step] = [save(tmp_path, step, worker, workers) for worker in workers]
        for uploader in uploaders:
            uploader.enqueue(step)
        for uploader in uploaders:
            assert uploader.wait(LONG_S)
    for uploader in uploaders:
        uploader.close()
    assert committed_steps(bucket) == [10, 20, 30]
    for step, expected in saved.items():
        assert manifests(bucket, step) == expected
        for manifest in expected:
            for name, wanted in manifest.files.items():
                stored = f"step_{step:08d}/{manifest.worker}/{name}"
                bucket.get(stored, tmp_path / "got" / stored, wanted)


def test_a_store_that_never_answers_well_stops_nothing(
    cloud: FaultyServer, bucket: Store, tmp_path: Path
) -> None:
    save(tmp_path, 10)
    cloud.fault = lambda *_: "reset"
    with Uploader(bucket, tmp_path, "a") as uploader:
        with pytest.warns(match="step 10 was not uploaded .*tried 10 times"):
            upload(uploader, 10)
    with pytest.raises(StoreError, match="tried 10 times"):
        committed_steps(bucket)
