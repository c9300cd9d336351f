# SPDX-License-Identifier: Apache-2.0
"""A clock that jumps back changes neither which save is the later nor what is old."""

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.checkpoint.format import AttemptNames
from hetjax.checkpoint.reader import Checkpoint, partial_checkpoints
from hetjax.checkpoint.storage import open_store
from hetjax.checkpoint.writer import CheckpointWriter
from tests.checkpoint.values import state_of

YEAR_NS = 365 * 24 * 3600 * 10**9


def named_after(known: Iterable[str]) -> AttemptNames:
    names = AttemptNames()
    names.note(known)
    return names


@given(
    clock_ns=st.lists(st.integers(0, 2**62), min_size=2, max_size=9),
    heard=st.lists(
        st.integers(0, 2**62).map("{:016x}".format) | st.just(""), max_size=4
    ),
    restart=st.integers(0, 8),
)
def test_each_name_comes_after_all_before_it_whatever_the_clock_says(
    clock_ns: list[int], heard: list[str], restart: int
):
    names = list(heard)
    with pytest.MonkeyPatch.context() as patched:
        told: Iterator[int] = iter(clock_ns)
        patched.setattr("hetjax.checkpoint.format.time.time_ns", lambda: next(told))
        found = named_after(names)
        for number in range(len(clock_ns)):
            if number == restart:
                found = named_after(names)
            names.append(found.new())
            assert all(name < names[-1] for name in names[:-1]), names
            assert len(names[-1]) == 16


def test_a_step_saved_again_after_the_clock_was_set_back_is_the_one_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By another worker, as after a loss; the first one's part is still there."""
    now_ns = time.time_ns()
    for worker, values, at_ns in (("a", 1, now_ns), ("b", 2, now_ns - YEAR_NS)):
        monkeypatch.setattr(
            "hetjax.checkpoint.format.time.time_ns", lambda at=at_ns: at
        )
        name = named_after(c.attempt for c in partial_checkpoints(tmp_path)).new()
        with CheckpointWriter(tmp_path, worker) as writer:
            writer.save(10, state_of(values), {"attempt": name})
    found = Checkpoint.open(tmp_path)
    for entry, value in state_of(2):
        np.testing.assert_array_equal(found.read(entry), value)


@pytest.mark.parametrize("ours_s", [0.0, 1e12])
def test_what_is_old_in_a_store_is_told_by_its_own_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours_s: float
):
    open_store(str(tmp_path))
    parts = tmp_path / ".parts"
    for name in ("old", "new"):
        (parts / name).write_bytes(b"half")
    os.utime(parts / "old", (1e9, 1e9))
    monkeypatch.setattr(time, "time", lambda: ours_s)
    open_store(str(tmp_path))
    assert [part.name for part in parts.iterdir()] == ["new"]
