# SPDX-License-Identifier: Apache-2.0
"""A run leaves the promised files and numbers."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from hetjax.checkpoint.reader import steps
from hetjax.cluster.cluster_files import load_cluster
from hetjax.data.tokenizer import load
from hetjax.errors import BadInput, RunFailed
from hetjax.optimizers.learning_rate import LearningRates
from hetjax.plans.plan_files import read_plan
from hetjax.report.metrics import KEYS
from hetjax.train import main
from hetjax.training import session as run_module
from hetjax.training.observers.tracing import steps_to_trace
from hetjax.training.session import run
from hetjax.training.settings.config import CheckpointConfig, OptimizerConfig
from hetjax.training.settings.presets import PRESETS
from hetjax.training.settings.values import config_values
from tests.report.html_page import Page
from tests.training.small import MODEL, SIX, TWO_REPLICAS, but, lines, small_preset


def test_a_run_writes_what_its_directory_promises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    preset = but(small_preset(tmp_path), steps=6, trace=True)
    assert run(preset.config, preset, MODEL) == 0
    run_dir = preset.config.run_dir
    settings = json.loads((run_dir / "config.json").read_text())
    values = config_values(preset.config)
    values["data"]["pack"] = False  # the best choice for texts, kept for later starts
    assert settings["config"] == values
    assert all(len(digest) == 64 for digest in settings["dataset"]["sha256"].values())
    assert load_cluster(run_dir / "cluster.toml") == load_cluster(SIX)
    assert read_plan(run_dir / "plan.json") == TWO_REPLICAS
    assert load(run_dir / "tokenizer.json").vocab_size == 320
    assert steps(run_dir / "checkpoints") == [6]
    trace = json.loads((run_dir / "trace.json").read_text())
    assert trace
    page = Page((run_dir / "report.html").read_text(encoding="utf-8"))
    assert "Steps as measured" in page.words

    metrics = lines(run_dir / "metrics.jsonl")
    assert all(line.keys() <= {"step", *KEYS} for line in metrics)
    trained = [line for line in metrics if "loss" in line]
    assert [line["step"] for line in trained] == [1, 2, 3, 4, 5, 6]
    assert all(line["tokens"] == 6 * 16 for line in trained)
    for line in trained:
        assert line["tokens_per_s"] == pytest.approx(96 / line["step_time_s"])
    rates = LearningRates(preset.config.optimizer, 6)
    assert [line["learning_rate"] for line in trained] == [rates[k] for k in range(6)]
    assert trained[0]["loss"] == pytest.approx(math.log(320), abs=0.1)
    assert trained[-1]["loss"] < trained[0]["loss"]
    evaluations = {line["step"]: line for line in metrics if "val_loss" in line}
    assert list(evaluations) == [0, 5, 6]
    [corpus] = (tmp_path / "cache").glob("corpus-*")
    manifest = json.loads((corpus / "manifest.json").read_text())
    bytes_per_token = manifest["bytes"]["validation"] / manifest["tokens"]["validation"]
    for line in evaluations.values():
        bits = line["val_loss"] / math.log(2) / bytes_per_token
        assert line["val_bits_per_byte"] == pytest.approx(bits)

    out = capsys.readouterr().out
    assert out.count("sample: ") == 3
    assert "done: 6 steps" in out and str(run_dir) in out
    assert "replica  stage  node" in out


def test_the_last_steps_are_traced_where_few_are_left_and_lost_metrics_do_no_harm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    preset = but(small_preset(tmp_path), steps=2, trace=True)
    run_dir = preset.config.run_dir
    assert run(preset.config, preset, MODEL) == 0
    assert f"trace of 2 steps: {run_dir / 'trace.json'}" in capsys.readouterr().out
    assert json.loads((run_dir / "trace.json").read_text())
    assert run(preset.config, preset, MODEL) == 0
    assert "no step is left to trace" in capsys.readouterr().out
    (run_dir / "metrics.jsonl").unlink()
    assert run(preset.config, preset, MODEL) == 0
    out = capsys.readouterr().out
    assert "done: 2 steps, val_loss" in out and "too few steps were left" in out


@pytest.mark.parametrize(
    ("num_steps", "stop_after", "first", "steps_traced"),
    [
        (100, None, 0, [2, 3, 4]),
        (100, None, 96, [1, 2, 3]),
        (100, None, 98, [0, 1]),
        (100, 4, 0, [1, 2, 3]),
        (100, None, 100, []),
    ],
)
def test_three_steps_are_traced_past_the_warm_up_or_else_the_last(
    num_steps: int, stop_after: int | None, first: int, steps_traced: list[int]
):
    config = replace(PRESETS["tiny"].config, steps=num_steps, stop_after=stop_after)
    assert list(steps_to_trace(config, first)) == steps_traced


def test_training_that_diverges_stops_and_keeps_the_last_checkpoint(tmp_path: Path):
    wild = OptimizerConfig(
        name="sgd",
        learning_rate=1e6,
        weight_decay=0.0,
        warmup_steps=0,
        clip_norm=float("inf"),
    )
    preset = but(
        small_preset(tmp_path), optimizer=wild, checkpoint=CheckpointConfig(every=1)
    )
    with pytest.raises(RunFailed) as error:
        run(preset.config, preset, MODEL)
    run_dir = preset.config.run_dir
    saved = max(steps(run_dir / "checkpoints"))
    assert f"the last checkpoint is of step {saved}" in str(error.value)
    assert "lower --optimizer.learning-rate (now 1000000.0)" in str(error.value)
    metrics = lines(run_dir / "metrics.jsonl")
    assert all(math.isfinite(line["loss"]) for line in metrics if "loss" in line)


def test_a_failed_run_has_exit_code_1_and_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*_: object) -> int:
        raise RunFailed(got="x", allowed="y", fix="z")

    monkeypatch.setattr("hetjax.training.session.run", fail)
    assert main(["tiny"]) == 1
    assert capsys.readouterr().err == "hetjax: error\ngot: x\nallowed: y\nfix: z\n"


def test_a_run_that_cannot_save_its_end_does_not_claim_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("hetjax.checkpoint.writer.CheckpointWriter._commit", full)
    preset = but(small_preset(tmp_path), steps=1)
    with pytest.raises(RunFailed, match="no complete checkpoint of step 1"):
        run(preset.config, preset, MODEL)


def test_nothing_is_written_before_the_data_is_known_to_be_good(tmp_path: Path):
    preset = small_preset(tmp_path)
    preset.config.data.path.write_text("   ")  # pyright: ignore
    with pytest.raises(BadInput, match="holds no text"):
        run_module.run(preset.config, preset, MODEL)
    assert not preset.config.run_dir.exists()
