# SPDX-License-Identifier: Apache-2.0
"""Observers see all of a run and do not change it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hetjax
from hetjax.errors import RunFailed
from hetjax.models.presets import MODEL_CONFIGS
from hetjax.runtime.execution.commit import StepCommit
from hetjax.training.observers import dispatch
from hetjax.training.observers.loading import observer_sources
from hetjax.training.observers.records import (
    EndRecord,
    EvaluationRecord,
    SavedRecord,
    StartRecord,
    StepRecord,
)
from hetjax.training.recovery.driver import Driver
from hetjax.training.session import run
from hetjax.training.settings.config import CheckpointConfig
from hetjax.training.settings.presets import PRESETS
from tests.training.observers.event_files import scalars
from tests.training.observers.seen import MODULE, Held, NotMade, Raising, Seen
from tests.training.small import (
    MODEL,
    MODEL_CONFIG,
    ONE_STAGE,
    but,
    lines,
    losses,
    small_preset,
)

pytestmark = pytest.mark.usefixtures("quickly")
STEPS = range(1, 7)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    monkeypatch.setattr(dispatch, "MOST_END_S", 1.0)
    observer = Held()
    yield observer
    observer.may_go.set()


def preset_in(folder: Path) -> Any:
    folder.mkdir()
    found = but(small_preset(folder, ONE_STAGE), steps=len(STEPS))
    return but(found, checkpoint=CheckpointConfig(every=4))


def numbers(line: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in line.items() if k != "step"}


def test_bad_observers_change_no_number_and_a_good_one_sees_every_line(
    tmp_path: Path, held: Held, capfd: pytest.CaptureFixture[str]
):
    plain, observed = preset_in(tmp_path / "plain"), preset_in(tmp_path / "observed")
    assert run(plain.config, plain, MODEL) == 0
    capfd.readouterr()
    seen, run_dir = Seen(), observed.config.run_dir
    given = observer_sources([held, Raising(), NotMade, seen, "tensorboard"])
    assert run(observed.config, observed, MODEL, given) == 0
    assert losses(run_dir) == losses(plain.config.run_dir)
    said = capfd.readouterr().out
    for told in ("Held is still busy", "Raising has raised", "NotMade has raised"):
        assert said.count(f"warning: observer {MODULE}:{told}") == 1
    assert said.count("warning: observer") == 3

    start, *rest, end = seen.records
    assert isinstance(start, StartRecord) and (start.step, start.steps) == (0, 6)
    assert (
        start.run_dir == run_dir and start.settings["optimizer.learning_rate"] == 0.01
    )
    assert end == EndRecord(step=6, outcome="finished")
    journal = lines(run_dir / "metrics.jsonl")
    steps = [each for each in rest if isinstance(each, StepRecord)]
    evaluations = [each for each in rest if isinstance(each, EvaluationRecord)]
    assert [(x.step, x.metrics) for x in steps] == [
        (line["step"], numbers(line)) for line in journal if "loss" in line
    ]
    assert [(x.step, x.metrics) for x in evaluations] == [
        (line["step"], numbers(line)) for line in journal if "val_loss" in line
    ]
    assert [x.step for x in rest if isinstance(x, SavedRecord)] == [4, 6]
    assert len(rest) == len(journal) + 2
    shown = scalars(run_dir / "tensorboard")["train/loss"]
    assert shown == pytest.approx({k: v[0] for k, v in losses(run_dir).items()})


def test_a_trainer_takes_them_and_they_are_given_again_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    preset = preset_in(tmp_path / "a")
    monkeypatch.setitem(MODEL_CONFIGS, "small", MODEL_CONFIG)
    monkeypatch.setitem(PRESETS, "small", preset)
    first, second = Seen(), Seen()
    with hetjax.Trainer("small", observers=[first]) as trainer:
        trainer.fit(2).fit(1)  # two calls, but one run
    assert [x.step for x in first.records if isinstance(x, StepRecord)] == [1, 2, 3]
    assert first.methods.count("on_start") == first.methods.count("on_end") == 1
    end = EndRecord(step=3, outcome="stopped", reason="--stop-after 1")
    assert first.records[-1] == end
    with hetjax.Trainer("small") as trainer:
        trainer.fit(1)
    with hetjax.Trainer("small", observers=[second]) as trainer:
        trainer.fit()
    start = second.records[0]
    assert isinstance(start, StartRecord) and start.step == 4
    began = first.records[0]
    assert isinstance(began, StartRecord) and start.run == began.run
    assert [x.step for x in second.records if isinstance(x, StepRecord)] == [5, 6]
    assert first.records[-1] == end
    assert "observers" not in (preset.config.run_dir / "config.json").read_text()


def test_a_run_that_fails_says_so_to_its_observers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    preset, seen, step = preset_in(tmp_path / "a"), Seen(), Driver.step
    full = RunFailed(got="a full disk", allowed="room", fix="make room")

    def step_or_fail(
        driver: Driver, number: int, *, traced: bool = False
    ) -> StepCommit:
        if number == 2:
            raise full
        return step(driver, number, traced=traced)

    monkeypatch.setattr(Driver, "step", step_or_fail)
    with pytest.raises(RunFailed):
        run(preset.config, preset, MODEL, observer_sources([seen]))
    # the loss of the second step had not arrived
    assert seen.records[-1] == EndRecord(step=1, outcome="failed", reason=str(full))
