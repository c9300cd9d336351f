# SPDX-License-Identifier: Apache-2.0
"""A journal keeps whole lines, up to a step."""

import json
from pathlib import Path

import pytest

from hetjax.errors import BadInput, RunFailed
from hetjax.training.directory.journal import Journal, read_journal


def test_lines_are_on_disk_as_soon_as_they_are_appended(tmp_path: Path):
    journal = Journal(tmp_path / "j.jsonl", last_step=0)
    journal.append({"step": 1, "loss": 0.5})
    assert (tmp_path / "j.jsonl").read_text() == '{"step": 1, "loss": 0.5}\n'
    journal.close()


def test_opening_drops_later_steps_and_a_line_that_was_cut_off(tmp_path: Path):
    path = tmp_path / "j.jsonl"
    whole = [{"step": step, "x": step} for step in (0, 1, 2, 2, 3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in whole) + '{"step": 1')
    assert read_journal(path) == whole
    journal = Journal(path, last_step=2)
    journal.append({"step": 3, "x": 7})
    journal.close()
    assert read_journal(path) == [*whole[:4], {"step": 3, "x": 7}]


def test_numbers_that_no_run_writes_are_refused(tmp_path: Path):
    path = tmp_path / "j.jsonl"
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": -Infinity}\n')
    with pytest.raises(BadInput, match="j.jsonl, line 2: -Infinity, which is not a"):
        read_journal(path)


def test_a_journal_that_is_not_there_is_empty(tmp_path: Path):
    assert read_journal(tmp_path / "none.jsonl") == []


def test_who_may_not_write_drops_no_lines_of_another(tmp_path: Path):
    """A paused run rolls back, or starts, after another run took its directory."""
    path, is_over = tmp_path / "j.jsonl", False

    def may_write() -> None:
        if is_over:
            raise RunFailed(got="taken over", allowed="one run", fix="stop")

    journal = Journal(path, last_step=0, may_write=may_write)
    journal.append({"step": 1, "loss": 0.5})
    is_over = True
    for too_late in (
        lambda: journal.rewind(0),
        lambda: journal.append({"step": 2, "loss": 0.5}),
        lambda: Journal(path, last_step=0, may_write=may_write),
    ):
        with pytest.raises(RunFailed):
            too_late()
    journal.close()
    assert read_journal(path) == [{"step": 1, "loss": 0.5}]
