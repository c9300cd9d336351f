# SPDX-License-Identifier: Apache-2.0
"""A clock that jumps back changes neither the order of saves nor which ones are old."""

import os
import time
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.checkpoint.format import AttemptNames
from hetjax.checkpoint.reader import Checkpoint
from hetjax.checkpoint.storage import open_store
from hetjax.checkpoint.writer import CheckpointWriter
from tests.checkpoint.values import state_of

YEAR_S = 365 * 24 * 3600


def named_after(known: Iterable[str], start: int) -> AttemptNames:
    names = AttemptNames(start)
    names.note(known)
    return names


@given(
    heard=st.lists(
        st.integers(0, 2**62).map("{:016x}".format) | st.just(""), max_size=4
    ),
    starts=st.lists(st.integers(0, 3), min_size=1, max_size=4).map(accumulate),
)
def test_each_name_comes_after_all_before_it(heard: list[str], starts: Iterable[int]):
    """After all names of this start and, if they were noted, of earlier starts."""
    names = list(heard)
    for start in starts:
        found = named_after(names, start)
        for _ in range(2):
            names.append(found.new())
            assert all(name < names[-1] for name in names[:-1]), names
            assert len(names[-1]) == 16


@given(st.integers(0, 2**31), st.integers(1, 100), st.integers(1, 5))
def test_names_of_a_later_start_come_after_those_that_it_never_saw(
    start: int, later: int, count: int
):
    earlier, names = AttemptNames(start), AttemptNames(start + later)
    for _ in range(count):
        assert earlier.new() < names.new()


def test_a_step_saved_again_by_a_later_start_is_the_one_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another worker saves it, a year behind and without seeing the first save."""
    now_s = time.time()
    for start, worker in ((1, "a"), (2, "b")):
        at_s = now_s - start * YEAR_S
        monkeypatch.setattr(time, "time", lambda at_s=at_s: at_s)
        monkeypatch.setattr(time, "time_ns", lambda at_s=at_s: int(at_s * 1e9))
        with CheckpointWriter(tmp_path, worker) as writer:
            name = AttemptNames(start).new()
            writer.save(10, state_of(start), host={"attempt": name})
    monkeypatch.undo()
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
