# SPDX-License-Identifier: Apache-2.0
"""Manifests with right checksums and wrong names, by every way in: none leads out."""

import json
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hetjax.checkpoint.fetching import StoredStep, fetch
from hetjax.checkpoint.file_records import record_of_bytes
from hetjax.checkpoint.format import MANIFEST, Manifest, part_directory, to_text
from hetjax.checkpoint.reader import Checkpoint, partial_checkpoints
from hetjax.checkpoint.replication import PeerReplication
from hetjax.checkpoint.stored_steps import in_store, manifests
from hetjax.checkpoint.stores.local import FileStore
from hetjax.comm.connections import Connection
from hetjax.comm.handshake import dial
from hetjax.errors import BadInput

SECRET = b"secret"
LOOT = b"not yours"
OUT = [
    "../../../loot",
    "state/../../../../loot",
    "/tmp/hetjax-loot",
    "",
    ".",
    "a\0b",
    "a" * 300,
]
OUT += ["state/link/loot"]


def manifest(**changed) -> Manifest:
    found = Manifest(
        step=1,
        worker="a",
        workers=("a",),
        state="state",
        entries=(),
        files={"state/_METADATA": record_of_bytes(LOOT)},
        host={},
    )
    return replace(found, **changed)


HOSTILE = {
    **{f"file {n!r:.30}": manifest(files={n: record_of_bytes(LOOT)}) for n in OUT},
    "worker ..": manifest(worker="..", workers=("..",)),
    "worker /": manifest(worker="/", workers=("/",)),
    "worker COMMIT": manifest(worker="COMMIT", workers=("COMMIT",)),
    "workers": manifest(workers=("a", "../..")),
    "state": manifest(state="..", files={"../loot": record_of_bytes(LOOT)}),
    "step": manifest(step="../1"),
    "negative step": manifest(step=-1),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A worker's folder with a part whose state has a link that leads outside."""
    state = part_directory(tmp_path / "here", 1, "a") / "state"
    state.mkdir(parents=True)
    (state / "link").symlink_to(tmp_path)
    return tmp_path / "here"


def store_with(top: Path, hostile: Manifest) -> FileStore:
    """Return a store as an attacker could leave it, with all checksums right."""
    text = to_text(hostile)
    part = top / "store" / "step_00000001" / "a"
    part.mkdir(parents=True)
    (part / "manifest.json").write_text(text)
    for name in hostile.files:
        try:
            target = part / name.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(LOOT)
        except (OSError, ValueError):
            continue
    sums = {"a": record_of_bytes(text.encode()).crc32c}
    body = {"version": 1, "step": 1, "manifests": sums}
    (part.parent / "COMMIT").write_text(json.dumps(body))
    return FileStore(top / "store", pause_s=0.0)


def left_outside(top: Path, before: set[Path]) -> set[Path]:
    inner = (top / "here", top / "store")
    return {
        path
        for path in {*top.rglob("*")} - before
        if not any(path.is_relative_to(folder) for folder in inner)
    }


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(
    "way",
    [
        lambda store, folder: fetch(store, folder, 1),
        lambda store, folder: StoredStep(store, 1, folder).read("_METADATA"),
    ],
)
def test_a_manifest_of_a_store_leads_nowhere_else(
    tmp_path: Path, folder: Path, name: str, way: Callable
):
    store = store_with(tmp_path, HOSTILE[name])
    before = {*tmp_path.rglob("*")}
    with pytest.raises((OSError, BadInput)):
        way(store, folder)
    assert left_outside(tmp_path, before) == set()


@pytest.mark.parametrize("name", [name for name in HOSTILE if "link" not in name])
def test_a_step_with_such_a_manifest_is_left_out_with_a_warning(
    tmp_path: Path, name: str
):
    store = store_with(tmp_path, HOSTILE[name])
    with pytest.warns(UserWarning, match="is not used"):
        assert in_store(store) == []


@pytest.mark.parametrize("worker", ["..", "../../x", "/x", "a/b", "", "a\0"])
def test_a_commit_that_names_no_worker_is_refused(tmp_path: Path, worker: str):
    store = store_with(tmp_path, manifest())
    body = {"version": 1, "step": 1, "manifests": {worker: "AAAAAA=="}}
    (tmp_path / "store/step_00000001/COMMIT").write_text(json.dumps(body))
    with pytest.raises(OSError, match="COMMIT cannot be used"):
        manifests(store, 1)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_manifest_on_the_disk_leads_nowhere_else(
    tmp_path: Path, folder: Path, name: str
):
    own = part_directory(folder, 1, "a")
    (own / MANIFEST).write_text(to_text(HOSTILE[name]))
    with pytest.raises(BadInput):
        Checkpoint.open(folder)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        assert [
            leaf for part in partial_checkpoints(folder) for leaf in part.leaves
        ] == []


@pytest.mark.parametrize("name", HOSTILE)
def test_a_manifest_of_a_peer_leads_nowhere_else(
    tmp_path: Path, folder: Path, name: str
):
    """As in a run, another worker's committed step lies beside it."""
    other = part_directory(folder, 1, "b")
    other.mkdir(parents=True)
    (other / MANIFEST).write_text(to_text(manifest(worker="b", workers=("b",))))
    before = {*tmp_path.rglob("*")}
    answers: list[int] = []
    with closing(PeerReplication("keeper", "127.0.0.1", SECRET, 2.0)) as keeper:
        keeper.store_in(folder, keep=1)
        link = Connection(
            dial(keeper.address, "a", "keeper", SECRET),
            "keeper",
            lambda peer, key, data: answers.append(key[0]),
            lambda peer, reason: None,
            2.0,
        )
        text = to_text(HOSTILE[name]).encode()
        link.send((0, 1, 0, 0, 0, 0), [np.frombuffer(text, np.uint8)])
        link.send((1, 1, 0, 0, 0, 0), [np.frombuffer(LOOT, np.uint8)])
        for _ in range(100):
            if answers:
                break
            link.send((1, 1, 0, 0, 0, 0), [np.frombuffer(LOOT, np.uint8)])
            time.sleep(0.02)
        link.close()
    is_kept = "link" in name  # restarting the part removed the link
    assert answers[0] == (2 if is_kept else 3)
    assert left_outside(tmp_path, before) == set()
    assert (other / MANIFEST).exists()


def test_objects_of_a_store_on_a_disk_lie_within_it(tmp_path: Path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "link").symlink_to(tmp_path)
    (tmp_path / "loot").write_bytes(LOOT)
    store = FileStore(tmp_path / "store", pause_s=0.0)
    for name in ("../loot", "/loot", str(tmp_path / "loot"), "link/loot"):
        for act in (
            lambda name: store.get_text(name),
            lambda name: store.put_text(name, "x"),
            lambda name: store.put(name, tmp_path / "loot", record_of_bytes(LOOT)),
            lambda name: store.get(name, tmp_path / "got", record_of_bytes(LOOT)),
            lambda name: store.remove([name]),
        ):
            with pytest.raises(BadInput):
                act(name)
    assert (tmp_path / "loot").read_bytes() == LOOT


def test_ordinary_names_pass_everywhere(tmp_path: Path):
    store = store_with(tmp_path, manifest())
    assert [found.worker for found in manifests(store, 1)] == ["a"]
    assert fetch(store, tmp_path / "here", 1).cloud_bytes == len(LOOT)
