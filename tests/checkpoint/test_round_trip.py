# SPDX-License-Identifier: Apache-2.0
import tempfile
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.checkpoint.format import Entry, Manifest, from_text, to_text
from hetjax.checkpoint.reader import Checkpoint, DamagedCheckpoint, steps
from hetjax.checkpoint.writer import CheckpointWriter
from tests.checkpoint.values import State, state_of, states


def save(directory: Path, step: int, state: State, worker: str = "embedded") -> None:
    with CheckpointWriter(directory, worker) as writer:
        assert writer.save(step, state, host={"step": step})


def assert_same(checkpoint: Checkpoint, state: State) -> None:
    for entry, value in state:
        read = checkpoint.read(entry)
        assert read.dtype == value.dtype and read.shape == value.shape
        assert read.tobytes() == np.ascontiguousarray(value).tobytes()


@settings(max_examples=15, deadline=None)
@given(states(), st.integers(0, 10**9))
def test_what_is_saved_is_read_back_to_the_bit(state: State, step: int) -> None:
    with tempfile.TemporaryDirectory() as path:
        save(Path(path), step, state)
        assert steps(Path(path)) == [step]
        checkpoint = Checkpoint.open(Path(path))
        assert checkpoint.step == step and checkpoint.host == {"step": step}
        assert dict(checkpoint.entries) == {entry.name: entry for entry, _ in state}
        assert_same(checkpoint, state)


def test_tensorstore_alone_reads_one_slice_under_the_documented_path(
    tmp_path: Path,
) -> None:
    entry = Entry("opt.0.mu.block_003.attention.q", (2, 16), np.dtype("f4"), (1, 8))
    value = np.arange(32, dtype=np.float32).reshape(2, 16)
    save(tmp_path, 10, [(entry, value)])
    leaf = "step_00000010/embedded/state/opt.0.mu.block_003.attention.q.5of8"
    path = f"{tmp_path / leaf}/"
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
    np.testing.assert_array_equal(
        ts.open(spec).result().read().result(), [[10, 11], [26, 27]]
    )


def test_orbax_alone_reads_the_whole_item(tmp_path: Path) -> None:
    table = np.arange(12, dtype=np.float32).reshape(4, 3).astype(ml_dtypes.bfloat16)
    count, zeros = np.array(7, np.int32), np.zeros((4, 3), np.float32)
    state = [
        (Entry("params.embedding.table", (4, 3), table.dtype, (0, 2)), table),
        (Entry("opt.0.nu.embedding.table", (4, 3), zeros.dtype, (0, 1)), zeros),
        (Entry("opt.0.count.embedding", (), count.dtype, (0, 1)), count),
    ]
    save(tmp_path, 1, state)
    item = ocp.PyTreeCheckpointer().restore(tmp_path / "step_00000001/embedded/state")
    slices = item["params"]["embedding"]["table"]
    np.testing.assert_array_equal(slices["0of2"], table[:2])
    np.testing.assert_array_equal(slices["1of2"], table[2:])
    assert slices["0of2"].dtype == ml_dtypes.bfloat16
    assert item["opt"]["0"]["count"]["embedding"]["0of1"] == 7
    np.testing.assert_array_equal(
        item["opt"]["0"]["nu"]["embedding"]["table"]["0of1"], zeros
    )


def test_zeros_and_arrays_without_elements_are_kept(tmp_path: Path) -> None:
    zeros, none = np.zeros((4, 4), np.float32), np.zeros((0, 4), np.float32)
    state = [
        (Entry("opt.0.nu.head.w", (4, 4), zeros.dtype, (1, 4)), zeros),
        (Entry("opt.0.nu.head.none", (0, 4), none.dtype, (1, 4)), none),
    ]
    save(tmp_path, 3, state)
    assert_same(Checkpoint.open(tmp_path), state)


def test_older_saves_without_a_file_for_a_slice_of_zeros_are_read(
    tmp_path: Path,
) -> None:
    zeros = np.zeros((4, 4), np.float32)
    state = [(Entry("opt.0.nu.head.w", (4, 4), zeros.dtype, (1, 2)), zeros)]
    save(tmp_path, 3, state)
    part = tmp_path / "step_00000003/embedded"
    manifest = from_text((part / "manifest.json").read_text())
    [chunk] = [name for name in manifest.files if name.endswith("1of2/c.0.0")]
    (part / chunk).unlink()
    files = {name: f for name, f in manifest.files.items() if name != chunk}
    (part / "manifest.json").write_text(to_text(replace(manifest, files=files)))
    assert_same(Checkpoint.open(tmp_path), state)


def test_an_element_of_a_stacked_array_is_an_array_of_no_dims(tmp_path: Path) -> None:
    counts = np.arange(3, dtype=np.int32)
    entry = Entry("opt.0.count.block_002", (), counts.dtype, (0, 1))
    save(tmp_path, 3, [(entry, counts[2])])
    assert_same(Checkpoint.open(tmp_path), [(entry, np.array(2, np.int32))])


def test_parts_of_several_workers_merge_and_count_only_together(tmp_path: Path) -> None:
    state, workers = state_of(5, num_entries=4), ("east-0", "west-0")
    with CheckpointWriter(tmp_path, "east-0") as writer:
        writer.save(5, state[:2], host={"step": 5}, workers=workers)
    assert steps(tmp_path) == []
    with CheckpointWriter(tmp_path, "west-0") as writer:
        writer.save(5, state[2:], host={"step": 5}, workers=workers)
    assert steps(tmp_path) == [5]
    assert_same(Checkpoint.open(tmp_path), state)


def test_workers_that_saved_different_values_of_one_entry_are_refused(
    tmp_path: Path,
) -> None:
    for seed, worker in ((1, "a"), (2, "b")):
        with CheckpointWriter(tmp_path, worker) as writer:
            writer.save(5, state_of(seed), host={}, workers=("a", "b"))
    with pytest.raises(DamagedCheckpoint, match="differ"):
        Checkpoint.open(tmp_path)


def test_an_entry_may_be_asked_for_in_other_slices(tmp_path: Path) -> None:
    [(entry, value)] = state_of(1, num_entries=1)
    save(tmp_path, 1, [(entry, value)])
    other = Entry(entry.name, entry.shape, entry.dtype, (0, 2))
    assert_same(Checkpoint.open(tmp_path), [(other, value)])


def test_a_manifest_survives_its_text_with_any_host_value() -> None:
    host = {"loss": 0.1 + 0.2, "text": "\u00e9\n", "nested": [1, None, {"a": [True]}]}
    manifest = Manifest(
        step=1,
        worker="w",
        workers=("w",),
        state="state",
        entries=(Entry("params.a.b", (2,), np.dtype(ml_dtypes.bfloat16), (0, 2)),),
        files={},
        host=host,
    )
    assert from_text(to_text(manifest)) == manifest
