# SPDX-License-Identifier: Apache-2.0
"""Copies of a worker's part on others' disks: whole, verified, and retained."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.checkpoint.format import Entry, step_numbers
from hetjax.checkpoint.reader import Checkpoint
from hetjax.checkpoint.recovery_plan import Save
from hetjax.checkpoint.replication import PeerReplication, copy_targets
from hetjax.checkpoint.stores.store import StoreError
from hetjax.checkpoint.writer import CheckpointWriter

ENTRIES = [Entry(f"params.w{n}", (4, 8), np.dtype(np.float32), (1, 4)) for n in (1, 2)]
Pair = tuple[PeerReplication, PeerReplication]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Worker a, and worker b, which keeps its copies."""
    a, b = (PeerReplication(name, "127.0.0.1", b"secret", 2.0) for name in "ab")
    with closing(a), closing(b):
        b.store_in(tmp_path / "b", keep=2)
        a.send_to({"b": b.address})
        yield a, b


def state(step: int) -> list[tuple[Entry, np.ndarray]]:
    rng = np.random.default_rng(step)
    return [(e, rng.standard_normal(e.shape, np.float32)) for e in ENTRIES]


def save(
    folder: Path,
    copies: PeerReplication,
    *steps: int,
    safe: Save | None = None,
    best: int | None = None,
) -> CheckpointWriter:
    with CheckpointWriter(folder, "a", copies=copies) as writer:
        for step in steps:
            writer.save(step, state(step), host={"step": step}, safe=safe, best=best)
            writer.wait()
    return writer


def same_files(one: Path, other: Path) -> bool:
    found = [
        {p.relative_to(top): p.read_bytes() for p in top.rglob("*") if p.is_file()}
        for top in (one, other)
    ]
    return found[0] == found[1] != {}


def test_a_copy_is_the_original_file_by_file_and_can_be_read(
    pair: Pair, tmp_path: Path
):
    writer = save(tmp_path / "a", pair[0], 1)
    assert writer.newest == (1, "")
    assert same_files(tmp_path / "a/step_00000001/a", tmp_path / "b/step_00000001/a")
    found = Checkpoint.open(tmp_path / "b")
    for entry, value in state(1):
        np.testing.assert_array_equal(found.read(entry), value)


def test_the_newest_steps_stay_and_the_one_that_all_have(pair: Pair, tmp_path: Path):
    save(tmp_path / "a", pair[0], 1, 2, 3, 4, safe=(1, ""))
    assert step_numbers(tmp_path / "b") == [1, 3, 4]


def test_the_best_step_stays_beside_them_here_and_at_the_peer(
    pair: Pair, tmp_path: Path
):
    save(tmp_path / "a", pair[0], 0, 1, 2, 3, 4, 5, safe=(2, ""), best=0)
    assert step_numbers(tmp_path / "a") == [0, 2, 4, 5]
    assert step_numbers(tmp_path / "b") == [0, 2, 4, 5]


def test_without_its_keeper_a_step_does_not_count_and_training_goes_on(
    pair: Pair, tmp_path: Path
):
    a, b = pair
    b.close()
    with pytest.warns(UserWarning, match="on fewer nodes than it should be"):
        writer = save(tmp_path / "a", a, 5)
    assert writer.newest is None
    assert Checkpoint.open(tmp_path / "a").step == 5


def test_a_full_disk_of_the_keeper_is_told(pair: Pair, tmp_path: Path):
    a, b = pair
    (tmp_path / "full").write_text("no folder")
    b.store_in(tmp_path / "full", keep=2)
    with pytest.warns(UserWarning, match="could not write it"):
        assert save(tmp_path / "a", a, 5).newest is None


def test_one_folder_for_both_is_written_once(pair: Pair, tmp_path: Path):
    a, b = pair
    b.store_in(tmp_path / "a", keep=2)
    assert save(tmp_path / "a", a, 1, 2, 3).newest == (3, "")
    assert step_numbers(tmp_path / "a") == [2, 3]
    assert Checkpoint.open(tmp_path / "a").step == 3


def test_what_was_damaged_before_it_was_sent_is_refused(pair: Pair, tmp_path: Path):
    save(tmp_path / "a", pair[0], 1)
    shutil.rmtree(tmp_path / "b")
    own = tmp_path / "a/step_00000001/a"
    chunk = next(own.rglob("c.0.0"))
    data = bytearray(chunk.read_bytes())
    data[3] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(StoreError, match="'b' has no copy of step 1"):
        pair[0].replicate(own, 1)
    assert not (tmp_path / "b/step_00000001/a/manifest.json").exists()


@given(
    st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.sampled_from("xyz")),
    st.integers(1, 4),
)
def test_each_worker_has_keepers_on_other_nodes(nodes: dict[str, str], copies: int):
    found = copy_targets(nodes, copies)
    assert found.keys() == nodes.keys()
    for worker, others in found.items():
        on = [nodes[other] for other in others]
        assert nodes[worker] not in on and len(set(on)) == len(on)
        assert len(on) == min(copies, len(set(nodes.values()))) - 1
