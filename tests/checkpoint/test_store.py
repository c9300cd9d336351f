# SPDX-License-Identifier: Apache-2.0
import itertools
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import google_crc32c
import pytest

from hetjax.checkpoint.file_records import FileRecord, record_of_file
from hetjax.checkpoint.storage import open_store
from hetjax.checkpoint.stores.local import FileStore
from hetjax.checkpoint.stores.store import (
    AccessDenied,
    BandwidthLimit,
    Conflict,
    CorruptData,
    Store,
    StoreError,
)
from hetjax.errors import BadInput
from tests.checkpoint.fake_gcs import FakeGcs
from tests.checkpoint.faulty_server import Fault, FaultyServer, Query

CONTENTS = {
    "empty": b"",
    "one byte": b"\0",
    "lines": b"a\r\n--boundary\r\n\r\nb\n" * 300,
    "random": random.Random(0).randbytes(20_000),
}
NAMES = ["step_00000010/a/state/params.w.0of8/c/0/0", "odd name/50%2F + \u00fc?#&="]
MIXED: list[Fault] = [
    503,
    429,
    "reset",
    "lose reply",
    ("truncate", 7),
    ("corrupt", 3),
]


def file_of(path: Path, data: bytes) -> tuple[Path, FileRecord]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path, record_of_file(path)


def first_times(num: int, fault: Fault, methods: str = "") -> Callable[..., Fault]:
    """Return a fault for the first `num` requests (with these methods) to each path."""
    counts: dict[tuple[str, str], int] = {}

    def choose(method: str, path: str, _: Query) -> Fault:
        if methods and method not in methods:
            return None
        counts[method, path] = counts.get((method, path), 0) + 1
        return fault if counts[method, path] <= num else None

    return choose


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", CONTENTS)
def test_what_is_put_can_be_got(
    store: Store, tmp_path: Path, name: str, content: str
) -> None:
    store.put(name, *file_of(tmp_path / "a", CONTENTS[content]))
    expected = record_of_file(tmp_path / "a")
    store.get(name, tmp_path / "deep/b", expected)
    assert (tmp_path / "deep/b").read_bytes() == CONTENTS[content]
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["b"]
    assert store.names("") == [name]


def test_the_same_content_again_is_success_another_is_a_conflict(
    store: Store, tmp_path: Path
) -> None:
    first = file_of(tmp_path / "a", b"first")
    store.put("x/y", *first)
    store.put("x/y", *first)
    with pytest.raises(Conflict, match="x/y already exists") as caught:
        store.put("x/y", *file_of(tmp_path / "b", b"other"))
    assert caught.value.exit_code == 2
    store.get("x/y", tmp_path / "c", first[1])
    assert (tmp_path / "c").read_bytes() == b"first"


def test_texts_follow_the_same_rules(store: Store) -> None:
    assert store.get_text("x/t") is None
    for _ in range(2):
        store.put_text("x/t", "gr\u00fcn\n")
    with pytest.raises(Conflict):
        store.put_text("x/t", "rot\n")
    assert store.get_text("x/t") == "gr\u00fcn\n"


def test_what_is_not_there_is_not_got(store: Store, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        store.get("x/nothing", tmp_path / "a", FileRecord(size_bytes=1, crc32c="="))
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_names_are_those_with_the_prefix(store: Store) -> None:
    names = ["step_1/a/m", "step_1/ab/m", "step_1/a/s/0", "step_2/a/m", "other/step_1"]
    for name in names:
        store.put_text(name, name)
    assert store.names("") == sorted(names)
    assert store.names("step_1/") == ["step_1/a/m", "step_1/a/s/0", "step_1/ab/m"]
    assert store.names("step_1/a/") == ["step_1/a/m", "step_1/a/s/0"]
    assert store.names("step_1/a") == ["step_1/a/m", "step_1/a/s/0", "step_1/ab/m"]
    assert store.names("nowhere/") == []


def test_names_of_many_pages_are_all_there(cloud: FaultyServer, bucket: Store) -> None:
    cloud.page_size = 2
    names = sorted(f"{folder}/{i}" for folder in "ab" for i in range(3))
    for name in names:
        bucket.put_text(name, name)
    assert bucket.names("") == names
    assert bucket.names("b/") == names[3:]


def test_removing_leaves_the_others_and_passes_over_the_missing(store: Store) -> None:
    for name in ("a/b/c", "a/b/d", "a/e"):
        store.put_text(name, name)
    store.remove(["a/b/c", "a/b/none", "none", "a/b/d"])
    assert store.names("") == ["a/e"]
    store.put_text("a/b/c", "new")
    assert store.get_text("a/b/c") == "new"


def test_the_store_says_when_an_object_was_written(store: Store) -> None:
    before_s = time.time()
    store.put_text("x", "text")
    assert store.written_s("x") == pytest.approx(before_s, abs=60.0)
    with pytest.raises(FileNotFoundError):
        store.written_s("y")


def test_a_file_that_is_not_as_recorded_is_never_stored(
    store: Store, tmp_path: Path
) -> None:
    path, good = file_of(tmp_path / "a", b"as saved")
    path.write_bytes(b"as s\0ved")
    with pytest.raises(CorruptData, match="crc32c"):
        store.put("x", path, good)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        store.put("x", path, good)
    assert store.names("") == []


def test_a_corrupt_object_never_takes_the_place_of_a_file(
    store: Store, tmp_path: Path
) -> None:
    store.put("x/y", *file_of(tmp_path / "a", b"rotten"))
    place, wanted = file_of(tmp_path / "got/b", b"as it")
    with pytest.raises(CorruptData, match=r"x/y: tried 10 times, .* not"):
        store.get("x/y", place, wanted)
    assert place.read_bytes() == b"as it"
    assert list(place.parent.iterdir()) == [place]


def test_one_of_many_that_create_at_once_wins(store: Store, tmp_path: Path) -> None:
    files = [file_of(tmp_path / str(i), bytes([i]) * 100) for i in range(8)]
    start = threading.Barrier(16)

    def put(i: int) -> bool:
        start.wait(timeout=10)
        try:
            store.put("x", *files[i % 8])
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        created = list(pool.map(put, range(16)))
    (winner,) = [i for i in range(8) if created[i] or created[i + 8]]
    assert created[winner] and created[winner + 8]
    store.get("x", tmp_path / "got", files[winner][1])


def test_a_limit_spreads_the_bytes_of_all_threads_over_time() -> None:
    limit = BandwidthLimit(100.0)
    assert limit.reserve(50, now_s=10.0) == pytest.approx(0.5)
    assert limit.reserve(100, now_s=10.0) == pytest.approx(1.5)
    assert limit.reserve(10, now_s=11.0) == pytest.approx(0.6)
    assert limit.reserve(10, now_s=50.0) == pytest.approx(0.1)


def test_every_uploaded_byte_goes_through_the_limit(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(BandwidthLimit, "spend", lambda _, n: taken.append(n))
    store.put("x", *file_of(tmp_path / "a", bytes(30_000)))
    assert sum(taken) == 30_000


@pytest.mark.parametrize(
    "fault", [500, 502, 504, 408, *MIXED, ("sleep", 0.15)], ids=str
)
def test_a_fault_that_passes_is_not_noticed(
    cloud: FaultyServer, tmp_path: Path, fault: Fault
) -> None:
    bucket = cloud.store("p", timeout_s=0.1)
    num = 1 if isinstance(fault, tuple) and fault[0] == "sleep" else 3
    cloud.fault = first_times(num, fault)
    data = CONTENTS["random"]
    bucket.put("x", *file_of(tmp_path / "a", data))
    bucket.put_text("t", "text")
    bucket.get("x", tmp_path / "b", record_of_file(tmp_path / "a"))
    assert (tmp_path / "b").read_bytes() == data
    assert bucket.get_text("t") == "text"
    assert bucket.names("") == ["t", "x"]
    bucket.remove(["x"])
    assert list(cloud.buckets["bucket"]) == ["p/t"]


def test_a_store_full_of_faults_gives_every_byte_as_it_was(
    cloud: FaultyServer, bucket: Store, tmp_path: Path
) -> None:
    dice, lock = random.Random(1), threading.Lock()
    seen: list[Fault] = []

    def fault(*_: object) -> Fault:
        with lock:
            chosen = dice.choice(MIXED) if dice.random() < 0.2 else None
            seen.append(chosen)
            return chosen

    cloud.fault = fault
    rng = random.Random(2)
    files = {
        f"s/{i}": file_of(tmp_path / f"a/{i}", rng.randbytes(rng.randrange(4000)))
        for i in range(60)
    }
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: bucket.put(name, *files[name]), files))
        assert bucket.names("s/") == sorted(files)
        gets = [
            pool.submit(bucket.get, name, tmp_path / name, files[name][1])
            for name in files
        ]
        for get in gets:
            get.result()
    for name, (path, _) in files.items():
        assert (tmp_path / name).read_bytes() == path.read_bytes()
    assert {str(fault) for fault in MIXED} < {str(fault) for fault in seen}


@pytest.mark.parametrize(
    ("fault", "cause"),
    [(503, "503"), (429, "429"), ("reset", "onnection"), (("truncate", 5), "ncompl")],
    ids=str,
)
def test_a_fault_that_stays_ends_in_an_error_that_tells_all(
    cloud: FaultyServer, bucket: Store, tmp_path: Path, fault: Fault, cause: str
) -> None:
    bucket.put("x/y", *file_of(tmp_path / "a", CONTENTS["random"]))
    cloud.fault = lambda *_: fault
    with pytest.raises(StoreError) as caught:
        bucket.get("x/y", tmp_path / "got/b", record_of_file(tmp_path / "a"))
    text = str(caught.value)
    assert text.startswith(f"{cloud.scheme}://bucket/run/x/y: tried 10 times, ")
    assert cause in text and "\n" not in text
    assert list(tmp_path.glob("got/*")) == []


def test_uploads_that_never_work_end_in_an_error(
    cloud: FaultyServer, bucket: Store, tmp_path: Path
) -> None:
    cloud.fault = lambda *_: 503
    with pytest.raises(StoreError, match="run/x: tried 10 times, .*503"):
        bucket.put("x", *file_of(tmp_path / "a", b"data"))
    assert sum(r.method == cloud.creating for r in cloud.log) == 10
    assert cloud.buckets["bucket"] == {}


def test_downloads_that_stay_corrupt_say_so(
    cloud: FaultyServer, bucket: Store, tmp_path: Path
) -> None:
    bucket.put("x", *file_of(tmp_path / "a", b"good data"))
    cloud.fault = lambda *_: ("corrupt", 4)
    place, expected = file_of(tmp_path / "b", b"good data")
    with pytest.raises(CorruptData, match="tried 10 times"):
        bucket.get("x", place, expected)
    with pytest.raises(CorruptData, match="tried 10 times"):
        bucket.get_text("x")
    assert place.read_bytes() == b"good data"
    assert not (tmp_path / "b.part").exists()


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_is_not_tried_again(
    cloud: FaultyServer, bucket: Store, status: int
) -> None:
    cloud.fault = lambda *_: status
    with pytest.raises(AccessDenied, match="run/x: tried once: "):
        bucket.put_text("x", "text")
    assert sum(r.method == cloud.creating for r in cloud.log) == 1


def test_an_upload_whose_reply_is_lost_is_ours_and_made_once(
    cloud: FaultyServer, bucket: Store, tmp_path: Path
) -> None:
    cloud.fault = first_times(1, "lose reply", cloud.creating)
    bucket.put("x", *file_of(tmp_path / "a", b"data"))
    assert cloud.buckets["bucket"]["run/x"].generation == 1
    assert [r.status for r in cloud.log if r.method == cloud.creating] == [412]


def test_an_object_that_vanishes_during_the_comparison_is_made_again(
    cloud: FaultyServer, bucket: Store
) -> None:
    bucket.put_text("x", "old")

    def vanish(method: str, *_: object) -> Fault:
        if method in ("GET", "HEAD"):
            cloud.buckets["bucket"].pop("run/x", None)

    cloud.fault = vanish
    bucket.put_text("x", "new")
    assert cloud.buckets["bucket"]["run/x"].data == b"new"


@pytest.mark.parametrize("fault", [None, 503, "reset", "lose reply"], ids=str)
def test_large_files_go_in_chunks_that_are_tried_one_by_one(
    gcs: FakeGcs, tmp_path: Path, fault: Fault
) -> None:
    bucket = gcs.store("run")
    data = random.Random(3).randbytes(1000) * (9 << 10)
    source, expected = file_of(tmp_path / "a", data)
    turns = itertools.cycle([fault, None])
    gcs.fault = lambda method, *_: next(turns) if method == "PUT" else None
    bucket.put("x", source, expected)
    assert gcs.buckets["bucket"]["run/x"].data == data
    chunks = [r.bytes_in for r in gcs.log if r.method == "PUT" and r.bytes_in]
    assert max(chunks) == 8 << 20
    assert sum(r.method == "POST" for r in gcs.log) == 1  # never restarted
    gcs.fault = first_times(1, ("truncate", 5 << 20), "GET")
    bucket.get("x", tmp_path / "b", expected)
    assert google_crc32c.value((tmp_path / "b").read_bytes()) == google_crc32c.value(
        data
    )
    downloaded = sum(r.bytes_out for r in gcs.log if r.method == "GET")
    assert downloaded < len(data) + (1 << 20)  # resumed where it was cut


def test_large_files_conflict_before_they_are_sent(
    gcs: FakeGcs, tmp_path: Path
) -> None:
    bucket = gcs.store("run")
    bucket.put_text("x", "small")
    with pytest.raises(Conflict, match=f"and {9 << 20} bytes"):
        bucket.put("x", *file_of(tmp_path / "a", bytes(9 << 20)))
    assert sum(r.bytes_in for r in gcs.log) < 10_000


def test_a_killed_put_leaves_nothing_to_be_seen(tmp_path: Path) -> None:
    open_store(str(tmp_path)).put_text("x", "text")
    parts = tmp_path / ".parts"
    old, new = parts / "old", parts / "new"
    for part in (old, new):
        part.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert open_store(f"file://{tmp_path}").names("") == ["x"]
    assert list(parts.iterdir()) == [new]


def test_an_opened_bucket_works(gcs: FakeGcs) -> None:
    for _ in range(2):
        store = open_store("gs://bucket/a/b/")
        store.put_text("x", "text")
    assert gcs.buckets["bucket"]["a/b/x"].data == b"text"
    assert str(store) == "gs://bucket/a/b"
    open_store("gs://bucket").put_text("top", "text")
    assert "top" in gcs.buckets["bucket"]


@pytest.mark.parametrize(
    ("url", "got"),
    [
        ("abfs://bucket/run", "checkpoint store 'abfs://bucket/run'"),
        ("file://host/run", "checkpoint store 'file://host/run'"),
        ("", "checkpoint store ''"),
        ("gs:///run", "without a bucket name"),
        ("gs://other/run", "bucket 'other' does not exist"),
    ],
)
def test_a_url_that_cannot_be_used_is_bad_input(
    gcs: FakeGcs, url: str, got: str
) -> None:
    with pytest.raises(BadInput) as caught:
        open_store(url)
    assert got in caught.value.got
    assert caught.value.allowed and caught.value.fix


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_bucket_that_refuses_is_bad_input(
    gcs: FakeGcs, status: int, method: str
) -> None:
    gcs.fault = lambda got, *_: status if got == method else None
    with pytest.raises(BadInput, match="refuses these credentials") as caught:
        open_store("gs://bucket/run")
    assert "roles/storage.objectAdmin" in caught.value.fix


def test_no_credentials_at_all_is_bad_input(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    for name in ("HOME", "CLOUDSDK_CONFIG"):
        monkeypatch.setenv(name, str(tmp_path))
    with pytest.raises(BadInput, match="no Google Cloud credentials") as caught:
        open_store("gs://bucket/run")
    assert "gcloud auth application-default login" in caught.value.fix


def test_a_directory_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="file/run cannot be used .Not a directory"):
        open_store(str(tmp_path / "file/run"))


def test_a_file_system_without_hard_links_is_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(BadInput, match="hard links"):
        open_store(str(tmp_path))


def test_a_limit_of_nothing_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="limit of 0 bytes per second"):
        open_store(str(tmp_path), bytes_per_s=0)


def test_a_limit_that_is_lifted_holds_up_nobody(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(5000))
    store = FileStore(
        tmp_path / "store", BandwidthLimit(1.0)
    )  # which takes over an hour
    with ThreadPoolExecutor(1) as pool:
        upload = pool.submit(store.put, "a/b", source, record_of_file(source))
        with pytest.raises(TimeoutError):
            upload.result(0.2)
        store.limit.lift()
        upload.result(30.0)
    assert (tmp_path / "store/a/b").read_bytes() == bytes(5000)
