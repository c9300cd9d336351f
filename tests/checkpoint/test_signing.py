# SPDX-License-Identifier: Apache-2.0
"""With a key, only what was written with it is trusted, wherever it comes from.

The attacker here knows all formats, makes all checksums right, and lacks the key.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hetjax.checkpoint.fetching import fetch, fetch_newest
from hetjax.checkpoint.format import MANIFEST, from_text, part_directory, to_text
from hetjax.checkpoint.reader import (
    Checkpoint,
    DamagedCheckpoint,
    partial_checkpoints,
    steps,
)
from hetjax.checkpoint.signing import read_key
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.checkpoint.stored_steps import in_store, manifests
from hetjax.checkpoint.stores.local import FileStore
from hetjax.checkpoint.stores.store import CorruptData
from hetjax.errors import BadInput
from tests.checkpoint.values import state_of

Forge = Callable[[Path, bytes], None]


def key_file(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


@pytest.fixture
def saved(tmp_path: Path) -> CheckpointStorage:
    """A signed step on the disk and in a store."""
    key = key_file(tmp_path / "run.key", os.urandom(64))
    storage = CheckpointStorage(
        directory=str(tmp_path / "here"),
        cloud=str(tmp_path / "store"),
        key_file=str(key),
    )
    with storage.writer("a") as writer:
        writer.save(1, state_of(1), host={"attempt": f"{1:016x}"})
    return storage


def store_of(storage: CheckpointStorage) -> FileStore:
    return FileStore(Path(str(storage.cloud)), pause_s=0.0)


def test_what_was_written_with_the_key_is_read_with_it(
    saved: CheckpointStorage, tmp_path: Path
):
    key, store = saved.key(), store_of(saved)
    found = Checkpoint.open(saved.at("a"), key=key)
    for entry, value in state_of(1):
        assert found.read(entry).tobytes() == value.tobytes()
    assert fetch(store, tmp_path / "there", 1, key).cloud_bytes > 0
    assert steps(tmp_path / "there", key) == [1]
    assert [found.save[0] for found in in_store(store, key)] == [1]


def test_without_a_key_signatures_are_not_looked_at(saved: CheckpointStorage):
    assert Checkpoint.open(saved.at("a")).step == 1
    assert len(manifests(store_of(saved), 1)) == 1


def unsigned(part: Path, key: bytes) -> None:
    """Write the manifest without a signature, as a run without a key does."""
    (part / MANIFEST).write_text(to_text(from_text((part / MANIFEST).read_text())))


def other_key(part: Path, key: bytes) -> None:
    own = from_text((part / MANIFEST).read_text())
    (part / MANIFEST).write_text(to_text(own, bytes(32)))


def changed(part: Path, key: bytes) -> None:
    """Write another state of the training loop under the old signature."""
    body = json.loads((part / MANIFEST).read_text())
    found = from_text(json.dumps(body))
    forged = json.loads(to_text(found)) | {"host": {"attempt": "00000009" + "f" * 8}}
    (part / MANIFEST).write_text(with_checksum(forged, body["signature"]))


def with_checksum(body: dict, signature: str) -> str:
    from hetjax.checkpoint.format import _checksum

    del body["crc32c"]
    return json.dumps({"crc32c": _checksum(body), **body, "signature": signature})


FORGERIES: dict[str, Forge] = {
    "unsigned": unsigned,
    "other key": other_key,
    "changed": changed,
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_manifest_on_the_disk_is_refused(saved: CheckpointStorage, name: str):
    key = saved.key()
    assert key is not None
    FORGERIES[name](part_directory(saved.at("a"), 1, "a"), key)
    assert Checkpoint.open(saved.at("a")).step == 1  # all else is right
    with pytest.raises(DamagedCheckpoint, match="is not trusted: .*not signed"):
        Checkpoint.open(saved.at("a"), key=key)
    with pytest.warns(UserWarning, match="not trusted"):
        assert partial_checkpoints(saved.at("a"), key) == []
    assert steps(saved.at("a"), key) == []


@pytest.mark.parametrize("name", [*FORGERIES, "commit unsigned", "commit changed"])
def test_a_forged_step_of_a_store_is_refused(
    saved: CheckpointStorage, name: str, tmp_path: Path
):
    key, store = saved.key(), store_of(saved)
    assert key is not None
    step = Path(str(saved.cloud)) / "step_00000001"
    commit = json.loads((step / "COMMIT").read_text())
    if name in FORGERIES:
        FORGERIES[name](step / "a", key)
        text = (step / "a" / MANIFEST).read_text()
        from hetjax.checkpoint.file_records import record_of_bytes

        commit["manifests"] = {"a": record_of_bytes(text.encode()).crc32c}
    elif name == "commit changed":
        commit["lease"] = 9
    if name != "commit changed":
        del commit["signature"]
    (step / "COMMIT").write_text(json.dumps(commit))
    assert len(manifests(store, 1)) == 1  # all else is right
    for act in (
        lambda: manifests(store, 1, key),
        lambda: fetch_newest(store, tmp_path / "there", -1, key),
    ):
        with pytest.raises(CorruptData, match="not signed"):
            act()
    with pytest.warns(UserWarning, match="is not used: .*not signed"):
        assert in_store(store, key) == []
    assert not (tmp_path / "there").exists()


def test_weights_with_the_checksum_of_others_are_refused(
    saved: CheckpointStorage, monkeypatch: pytest.MonkeyPatch
):
    """Anyone can match a CRC; here all are equal."""
    key = saved.key()
    found = Checkpoint.open(saved.at("a"), key=key)
    entry, value = next((e, v) for e, v in state_of(1) if v.size)
    leaf = next(name for name in found.leaves if name.startswith(f"{entry.name}."))
    path = max(found.leaf(leaf).files, key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr("hetjax.checkpoint.file_records._base64", lambda digest: "same")
    with pytest.raises(DamagedCheckpoint):
        found.read(entry)
    monkeypatch.setattr(
        "hetjax.checkpoint.file_records.FileRecord.__eq__", lambda self, other: True
    )
    with pytest.raises(DamagedCheckpoint, match="is not what was signed"):
        found.read(entry)


@pytest.mark.parametrize(
    ("data", "mode", "got"),
    [
        (b"short", 0o600, "with 5 bytes"),
        (bytes(5000), 0o600, "with more than 4,096 bytes"),
        (bytes(64), 0o644, "which other users of this machine can access"),
    ],
)
def test_a_key_that_is_none_is_refused(
    tmp_path: Path, data: bytes, mode: int, got: str
):
    with pytest.raises(BadInput) as refused:
        read_key(key_file(tmp_path / "key", data, mode))
    assert got in refused.value.got and "head -c 64" in refused.value.fix
    assert (f"chmod 600 {tmp_path}/key, or" in refused.value.fix) == (mode == 0o644)


def test_what_is_no_plain_file_is_no_key_and_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path, kind in ((tmp_path / "fifo", "a FIFO"), (Path("/dev/zero"), "a device")):
        with pytest.raises(BadInput) as refused:
            read_key(path)
        assert kind in refused.value.got and "head -c 64" in refused.value.fix


def test_a_key_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(BadInput, match="cannot be read"):
        read_key(tmp_path / "none")


def test_copies_of_signed_parts_stay_signed(saved: CheckpointStorage, tmp_path: Path):
    shutil.copytree(saved.at("a"), tmp_path / "copy")
    assert steps(tmp_path / "copy", saved.key()) == [1]
