# SPDX-License-Identifier: Apache-2.0
"""The parts of a start's time, and how the loop measures them."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.cluster.cluster import Cluster, Node
from hetjax.optimizers.learning_rate import LearningRates
from hetjax.report.progress import Display
from hetjax.runtime.execution.commit import StepCommit
from hetjax.training.directory.best import BestCheckpoint
from hetjax.training.directory.journal import Journal, read_journal
from hetjax.training.loop import Loop
from hetjax.training.observers.goodput import (
    Goodput,
    Spent,
    steps_s,
)
from hetjax.training.recorder import Recorder
from hetjax.training.recovery.notices import StopRequest
from hetjax.training.recovery.recovered import Recovered, RolledBack
from hetjax.training.saving import Saving
from hetjax.training.settings.config import (
    CheckpointConfig,
    EvaluationConfig,
    RunConfig,
)

LINES = [
    {"step": 0, "val_loss": 5.0},
    {"step": 1, "loss": 5.0, "step_time_s": 4.0},
    {"step": 2, "loss": 4.0, "step_time_s": 2.0},
    {"step": 2, "val_loss": 4.0},
    {"step": 3, "loss": 3.0, "step_time_s": 3.0},
]
SECONDS = {"finish": 0.25, "replan": 0.5, "build": 1.0, "move": 0.25}


def test_the_parts_of_a_start_that_was_disturbed_once():
    found = Spent(after=0, lost_s=1.0, recoveries=[SECONDS]).goodput(LINES, 18.0)
    assert found.productive_s == 9.0
    assert (found.recovering_s, found.replanning_s) == (1.5, 0.5)
    assert (found.lost_s, found.other_s, found.total_s) == (1.0, 6.0, 18.0)
    assert found.goodput == 0.5 and found.is_disturbed
    assert str(found) == (
        "goodput 0.50: 9.0 s productive, 1.0 s lost, 1.5 s recovering, "
        "0.5 s re-planning, 0.0 s data, 0.0 s compiling, 0.0 s evaluating, "
        "0.0 s saving, 6.0 s other"
    )
    assert found.values() == {
        "goodput": 0.5,
        "productive_s": 9.0,
        "lost_s": 1.0,
        "recovering_s": 1.5,
        "replanning_s": 0.5,
        "other_s": 6.0,
        "data_s": 0.0,
        "compiling_s": 0.0,
        "evaluating_s": 0.0,
        "saving_s": 0.0,
    }


def test_a_part_is_without_the_recoveries_meanwhile(monkeypatch: pytest.MonkeyPatch):
    now_s = 5.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    spent = Spent(after=0, parts_s={"data": 1.0})
    with pytest.raises(RolledBack), spent.on("evaluating"):
        now_s += 3.0
        spent.recoveries.append(SECONDS)
        raise RolledBack(1)
    with spent.on("data"):
        now_s += 0.5
    found = spent.goodput([], 10.0)
    assert (found.evaluating_s, found.data_s) == (1.0, 1.5)
    assert (found.recovering_s, found.replanning_s, found.other_s) == (1.5, 0.5, 5.5)


def test_steps_of_an_earlier_start_do_not_count():
    found = Spent(after=2).goodput(LINES, 4.0)
    assert (found.productive_s, found.other_s) == (3.0, 1.0)
    assert not found.is_disturbed


def test_a_start_of_no_time_has_no_goodput():
    assert Spent(after=0).goodput([], 0.0).goodput == 0.0


def test_steps_that_are_undone_are_lost_and_count_once_when_they_come_again():
    spent = Spent(after=1)
    spent.undo(LINES[3:], 2)  # step 3, of this start
    assert (spent.lost_s, spent.after) == (3.0, 1)
    spent.undo(LINES[1:3], 0)  # step 1 is of an earlier start, step 2 of this one
    assert (spent.lost_s, spent.after) == (5.0, 0)
    again = [{"step": step, "step_time_s": 1.0} for step in (1, 2, 3)]
    assert spent.goodput(again, 10.0).productive_s == 3.0


_SECONDS = st.floats(0, 1e6)
_PHASES = st.dictionaries(st.sampled_from([*SECONDS, "start", "compile"]), _SECONDS)


@given(st.lists(_SECONDS), st.lists(_PHASES), st.integers(0, 9), _SECONDS, _SECONDS)
def test_the_parts_sum_to_the_total(
    times_s: list[float],
    recoveries: list[dict[str, float]],
    after: int,
    lost_s: float,
    other_s: float,
):
    lines = [{"step": n, "step_time_s": s} for n, s in enumerate(times_s, start=1)]
    took_s = sum(sum(seconds.values()) for seconds in recoveries)
    total_s = steps_s(lines, after) + took_s + lost_s + other_s
    spent = Spent(after=after, lost_s=lost_s, recoveries=[*recoveries])
    found = spent.goodput(lines, total_s)
    assert found.total_s == pytest.approx(total_s)
    assert found.other_s == pytest.approx(other_s, abs=1e-9 * total_s)
    assert found.productive_s == sum(times_s[after:])
    assert 0 <= found.goodput <= 1 + 1e-9


COMMIT = StepCommit(squares=64.0, losses=[((0, 0), 16.0)], num_tokens=8)


class _Driver:
    """A driver with steps of 1 s on a fake clock, and mishaps in between."""

    is_not_finite, is_kept = False, True

    def __init__(self, mishaps: dict[int, Callable[["_Driver"], None]]) -> None:
        self.now_s, self._mishaps, self.validation_weights = 100.0, mishaps, [1.0]
        self.on_recovery: Callable[[Recovered], None] = lambda recovered: None
        self.saved: int | None = None
        self.comparing_s = 0.0

    def step(self, number: int, *, traced: bool = False) -> StepCommit:
        self._mishaps.pop(number, lambda driver: None)(self)
        self.now_s += 1.0
        return COMMIT

    def recover(self, from_step: int, step: int) -> None:
        """Advance the clock by 2 s, as SECONDS say."""
        self.now_s += 2.0
        node = Node(name="cpu-0", device="cpu", count=1)
        self.on_recovery(
            Recovered(
                reason="worker 'cpu-0' is gone",
                plan=None,
                cluster=Cluster(name="one", nodes=(node,)),
                started=frozenset(),
                from_step=from_step,
                step=step,
                num_bytes={},
                seconds=SECONDS,
                tier_s={},
            )
        )

    def compare(self, step: int, step_time_s: float, parts: object) -> None:
        """Advance the clock by the time of predicting a step."""
        self.now_s += self.comparing_s if step == 2 else 0.0

    def validate(self, number: int) -> float:
        self.now_s += 8.0
        return 2.0

    def check(self) -> tuple[bool, tuple[()]]:
        return True, ()

    def save(self, step: int, best: Callable[[], int | None]) -> bool:
        self.saved = step
        self.now_s += 16.0
        return True

    def wait_saved(self) -> None:
        pass


def _told(
    driver: _Driver, folder: Path, patched: pytest.MonkeyPatch
) -> tuple[list[float], Goodput]:
    """Return the step times of a run of four steps, and its goodput."""
    patched.setattr(time, "perf_counter", lambda: driver.now_s)
    config = RunConfig(model="tiny", run_dir=folder, steps=4, seq_len=8, global_batch=1)
    config = replace(config, checkpoint=CheckpointConfig(every=0))
    config = replace(config, evaluation=EvaluationConfig(every=0, sample_tokens=0))
    journal = Journal(folder / "metrics.jsonl", last_step=0)
    events = Journal(folder / "events.jsonl", last_step=4)
    recorder = Recorder(folder, journal, events, Display(4))
    patched.setattr(recorder, "compare", driver.compare)
    loop = Loop(
        config=config,
        driver=cast(Any, driver),
        dataset=cast(Any, SimpleNamespace(bytes_per_token=1.0)),
        learning_rates=LearningRates(config.optimizer, config.steps, 0),
        recorder=recorder,
        saving=Saving(
            driver=cast(Any, driver),
            recorder=recorder,
            best=BestCheckpoint({}, keep=2),
        ),
        stop=StopRequest(),
        spent=Spent(after=0),
    )
    driver.on_recovery = loop.on_recovery
    assert loop.run(0) == 4
    journal.close()
    events.close()
    lines = [x for x in read_journal(folder / "metrics.jsonl") if "loss" in x]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    found = loop.spent.goodput(lines, driver.now_s - 100.0)
    # two evaluations, before the first step and after the last; one save
    assert (found.evaluating_s, found.saving_s) == (16.0, 16.0)
    found = replace(found, evaluating_s=0.0, saving_s=0.0)
    return [line["step_time_s"] for line in lines], found


def test_a_step_that_is_done_again_has_its_own_time_and_the_first_try_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def lost_half_way(driver: _Driver) -> None:
        driver.now_s += 0.5
        driver.recover(2, 2)

    times_s, found = _told(_Driver({2: lost_half_way}), tmp_path, monkeypatch)
    assert times_s == [1.0, 1.0, 1.0, 1.0]
    assert (found.lost_s, found.recovering_s, found.replanning_s) == (0.5, 1.5, 0.5)
    assert (found.productive_s, found.other_s, found.total_s) == (4.0, 0.0, 6.5)


def test_a_step_that_the_others_have_finished_counts_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    finished = _Driver({2: lambda driver: driver.recover(2, 3)})
    times_s, found = _told(finished, tmp_path, monkeypatch)
    assert times_s == [1.0, 1.0, 1.0, 1.0]
    assert (found.lost_s, found.productive_s, found.total_s) == (0.0, 4.0, 6.0)


def test_the_comparison_with_the_prediction_is_no_part_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    driver = _Driver({})
    driver.comparing_s = 3.0
    times_s, found = _told(driver, tmp_path, monkeypatch)
    assert times_s == [1.0, 1.0, 1.0, 1.0]
    assert (found.productive_s, found.other_s) == (4.0, 3.0)


class _LostAsItGoesBack(_Driver):
    """A driver whose third step has bad numbers, and whose rollback loses a worker."""

    def step(self, number: int, *, traced: bool = False) -> StepCommit:
        is_first = self._mishaps.pop(number, None) is not None
        self.now_s += 1.0
        return replace(COMMIT, is_finite=not is_first)

    def wait_saved(self) -> None:
        if self.saved is None:
            self.saved = 1
            raise RolledBack(1)


def test_a_run_goes_on_where_a_worker_is_lost_while_it_goes_back_from_bad_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    driver = _LostAsItGoesBack({2: lambda driver: None})
    times_s, _ = _told(driver, tmp_path, monkeypatch)
    assert times_s == [1.0, 1.0, 1.0, 1.0]


def test_steps_that_are_rolled_back_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def back_to_1(driver: _Driver) -> None:
        driver.now_s += 0.25
        driver.recover(3, 1)
        raise RolledBack(1)

    times_s, found = _told(_Driver({3: back_to_1}), tmp_path, monkeypatch)
    assert times_s == [1.0, 1.0, 1.0, 1.0]
    # step 2, step 3 (which has no line yet), and the start of step 4
    assert (found.lost_s, found.productive_s, found.total_s) == (2.25, 4.0, 8.25)
    assert (found.other_s, found.recovering_s, found.replanning_s) == (0.0, 1.5, 0.5)
