# SPDX-License-Identifier: Apache-2.0
"""`Trainer`: the run of the command, in parts, with the same numbers."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hetjax
from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.cluster_files import load_cluster
from hetjax.errors import BadInput, RunFailed
from hetjax.models.presets import MODEL_CONFIGS
from hetjax.report.journals import Events, Metrics
from hetjax.training.layout.hardware import has_room
from hetjax.training.recovery.driver import Driver
from hetjax.training.session import run
from hetjax.training.settings.presets import PRESETS
from tests.training.small import (
    MODEL,
    MODEL_CONFIG,
    ONE_REPLICA,
    ONE_STAGE,
    SIX,
    TWO_REPLICAS,
    lines,
    small_preset,
)

# for tests that allow rounding: otherwise a resumed run has the same bits
quickly = pytest.mark.usefixtures("quick_compiling")


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A function that makes a folder for preset `small`, and returns the run's."""
    monkeypatch.setitem(MODEL_CONFIGS, "small", MODEL_CONFIG)

    def made(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        preset = small_preset(folder)
        monkeypatch.setitem(PRESETS, "small", preset)
        return preset.config.run_dir

    return made


def numbers(run_dir: Path) -> list[tuple[float, ...]]:
    """Return all numbers of `metrics.jsonl` except times."""
    keys = ("step", "loss", "grad_norm", "learning_rate", "val_loss")
    return [
        tuple(line[key] for key in keys if key in line)
        for line in lines(run_dir / "metrics.jsonl")
    ]


def test_a_run_in_parts_has_the_numbers_of_the_command(make: Callable[..., Path]):
    whole = make("whole")
    preset = PRESETS["small"]
    assert run(preset.config, preset, MODEL) == 0
    parts = make("parts")
    with hetjax.Trainer("small") as trainer:
        assert trainer.plan == TWO_REPLICAS
        assert trainer.fit(3).metrics[-1]["step"] == 3
        assert trainer.fit(2).metrics[-1]["step"] == 5
    with hetjax.Trainer("small") as trainer:  # resumes from the checkpoint
        trainer.fit()
        assert trainer.fit().metrics[-1]["step"] == 10  # nothing is left to do
    assert numbers(parts) == numbers(whole)
    assert trainer.metrics == lines(parts / "metrics.jsonl")
    assert list((parts / "checkpoints").iterdir())


@quickly
def test_state_can_be_looked_at_before_between_and_after(make: Callable[..., Path]):
    run_dir = make("a")
    with hetjax.Trainer("small") as trainer:
        before = trainer.sample("The", num_tokens=4)
        assert (
            before.startswith("The") and trainer.sample("The", num_tokens=4) == before
        )
        assert trainer.metrics == []
        trainer.fit(3)
        line = trainer.evaluate()
        assert line["step"] == 3 and line["val_bits_per_byte"] > 0
        assert trainer.evaluate() == line
        trainer.fit()
    evaluated = [x["step"] for x in lines(run_dir / "metrics.jsonl") if "val_loss" in x]
    assert evaluated == [0, 3, 5, 10]
    with hetjax.Trainer("small") as trainer:  # which is done
        assert trainer.evaluate()["step"] == 10
        assert trainer.sample(num_tokens=0) == ""
    with pytest.raises(BadInput, match="evaluation.temperature"):
        trainer.sample(temperature=-1.0)


@quickly
def test_a_directory_is_held_until_close(make: Callable[..., Path]):
    make("a")
    first, second = hetjax.Trainer("small"), hetjax.Trainer("small")
    first.fit(1)
    with pytest.raises(BadInput, match="which is this one"):
        second.fit(1)
    first.close()
    assert [line["step"] for line in second.fit(1).metrics if "loss" in line] == [1, 2]
    second.close()
    first.fit(1)  # a closed trainer opens its run again
    assert [line["step"] for line in first.metrics if "loss" in line] == [1, 2, 3]
    first.close()


@quickly
def test_after_an_error_it_goes_on_from_the_checkpoint(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    make("a")
    trainer = hetjax.Trainer("small")
    trainer.fit(2)

    def full(self: Driver, step: int, *best: Any) -> bool:
        raise OSError(28, "No space left on device", "a file")

    with monkeypatch.context() as patched:
        patched.setattr(Driver, "save", full)
        with pytest.raises(RunFailed, match="make room on that disk"):
            trainer.fit(2)
    trainer.fit(1)
    assert [x["step"] for x in trainer.metrics if "loss" in x] == [1, 2, 3]
    trainer.close()


@quickly
def test_cluster_and_plan_may_be_values(make: Callable[..., Path]):
    run_dir = make("a")
    with hetjax.Trainer(
        "small", cluster=load_cluster(SIX), plan=ONE_REPLICA
    ) as trainer:
        trainer.fit(1)
        assert trainer.plan == ONE_REPLICA
    assert hetjax.load_plan(run_dir / "plan.json") == ONE_REPLICA
    with hetjax.Trainer("small", plan=ONE_STAGE, seed=0) as trainer:
        assert trainer.plan == ONE_STAGE
    with pytest.raises(BadInput, match="the given plan: global_batch = 6"):
        hetjax.Trainer("small", plan=ONE_STAGE, global_batch=12, run_dir="new").fit()


def test_they_may_be_files_too(make: Callable[..., Path]):
    folder = make("a").parent
    hetjax.save_plan(ONE_STAGE, folder / "one.json")
    trainer = hetjax.Trainer("small", cluster=SIX, plan=str(folder / "one.json"))
    assert (trainer.config.cluster, trainer.plan) == (SIX, ONE_STAGE)
    trainer.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stpes": 3}, "did you mean 'steps'"),
        ({"steps": "many"}, "settings.steps"),
        ({"steps": 0}, "steps = 0"),
        ({"optimizer": {"learning_rte": 1.0}}, "did you mean 'learning_rate'"),
        ({"optimizer": 3}, "settings.optimizer"),
        ({"cluster": "nowhere.toml"}, "nowhere.toml"),
        ({"plan": "nowhere.json"}, "nowhere.json"),
    ],
)
def test_what_cannot_be_is_refused_in_three_parts(
    changes: dict, said: str, make: Callable[..., Path]
):
    run_dir = make("a")
    with pytest.raises(BadInput, match=said) as refused:
        hetjax.Trainer("small", **changes).fit()
    assert refused.value.got and refused.value.allowed and refused.value.fix
    assert not run_dir.exists()


def test_settings_change_by_keyword_and_the_others_stay(make: Callable[..., Path]):
    make("a")
    before = PRESETS["small"].config
    config = hetjax.Trainer("small", steps=7, optimizer={"beta1": 0.5}).config
    assert (config.steps, config.optimizer.beta1) == (7, 0.5)
    assert config.optimizer.learning_rate == before.optimizer.learning_rate
    assert config.data == before.data
    assert hetjax.Trainer(config, steps=8).config.optimizer.beta1 == 0.5


def test_initial_weights_are_named_by_their_path(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make("a")
    (tmp_path / "base" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for given, kept in (
        ("base/model", str(tmp_path / "base" / "model")),
        ("OWNER/MODEL", "OWNER/MODEL"),  # on the hub
    ):
        assert hetjax.Trainer("small", init=given).config.init == kept


@pytest.mark.parametrize(
    ("misuse", "said"),
    [
        (lambda trainer: trainer.fit("2"), "steps = '2'"),
        (lambda trainer: trainer.fit(0), "steps = 0"),
        (lambda trainer: trainer.batch(2.5), "step = 2.5"),
        (lambda trainer: trainer.sample(["a"]), "prompt = "),
        (lambda trainer: trainer.sample("a", num_tokens=2.5), "sample_tokens = 2.5"),
        (lambda trainer: hetjax.Trainer("small", lr=0.1), "unknown setting 'lr'"),
    ],
)
def test_arguments_of_the_wrong_type_are_bad_input(
    make: Callable[..., Path], misuse: Callable[[hetjax.Trainer], object], said: str
):
    make("a")
    with pytest.raises(BadInput) as refused:
        misuse(hetjax.Trainer("small"))
    assert said in refused.value.got


def test_a_setting_of_a_group_is_found_by_its_own_name(make: Callable[..., Path]):
    make("a")
    with pytest.raises(BadInput) as refused:
        hetjax.Trainer("small", learning_rate=0.1)
    assert refused.value.fix == "optimizer={'learning_rate': ...}"


@pytest.mark.parametrize(("count", "fits"), [(16, True), (17, False)])
def test_a_process_in_which_jax_runs_simulates_what_it_has_devices_for(
    count: int, fits: bool, make: Callable[..., Path]
):
    make("a")
    preset = PRESETS["small"]
    cluster = Cluster(name="c", nodes=(Node(name="a", device="H20", count=count),))
    assert has_room(preset.config, preset, cluster) == fits
    assert has_room(preset.config, preset)


def test_metrics_are_a_list_with_pandas_and_without(monkeypatch: pytest.MonkeyPatch):
    first = {"note": "x", "step": 0, "val_loss": 2.0}
    metrics = Metrics([first, {"step": 1, "loss": 2.5}])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(BadInput, match="hetjax\\[notebook\\]"):
        metrics.frame()
    monkeypatch.undo()
    frame = metrics.frame()
    assert [*frame.columns] == ["step", "loss", "val_loss", "note"]
    assert [*frame["loss"].dropna()] == [2.5] and [*frame["note"].dropna()] == ["x"]
    assert frame.attrs["units"]["val_loss"] == "nats per token"
    assert isinstance(metrics, list)
    html = metrics._repr_html_()
    assert html.count("<tr>") == 3 and "<td>2.5</td>" in html


def test_events_show_what_happened_and_can_be_taken_by_name():
    when = {"time": "2026-08-01T09:30:15+00:00"}
    saved = {"event": "saved", "step": 9} | when
    gone = {"event": "recovered", "step": 9, "started": ["a"], "lost_steps": 0} | when
    events = Events([saved, gone | {"seconds": {"start": 1.5, "move": 0.25}}])
    assert events.named("recovered") == events[1:]
    said = "9     09:30:15  recovered  started: a; seconds: start 1.5, move 0.25"
    assert str(events).splitlines()[2] == said
    html = events._repr_html_()
    assert html.count("<tr>") == 3 and "<td>saved</td>" in html


@quickly
def test_batches_events_and_processes_can_be_looked_at(make: Callable[..., Path]):
    run_dir = make("a")
    with hetjax.Trainer("small") as trainer:
        assert [*trainer.workers.values()] == [os.getpid()]
        inputs, targets = trainer.batch(1)
        assert inputs.shape == targets.shape == (6, 16)
        assert np.array_equal(inputs[:, 1:], targets[:, :-1])
        assert not np.array_equal(inputs, trainer.batch(2)[0])
        with pytest.raises(BadInput, match="1 to 10"):
            trainer.batch(0)
        trainer.fit(1)
    assert trainer.events == lines(run_dir / "events.jsonl")
    assert [line["step"] for line in trainer.events.named("saved")] == [1]
