# SPDX-License-Identifier: Apache-2.0
"""A run that takes seconds: a two-block Llama on the licence text, and two plans."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetjax.models.decoders import LlamaConfig, llama_model
from hetjax.models.fingerprint import fingerprint
from hetjax.models.model import Model
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh
from hetjax.plans.plan_files import write_plan
from hetjax.training.settings.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    RunConfig,
)
from hetjax.training.settings.presets import Preset

LICENCE = Path(__file__).parents[2] / "LICENSE"
SIX = Path(__file__).parent / "six.toml"  # the cluster of these plans
MODEL_CONFIG = LlamaConfig(
    name="small",
    vocab_size=320,
    hidden_size=16,
    inner_size=32,
    num_blocks=2,
    num_heads=4,
    num_kv_heads=4,
    max_seq_len=16,
)
MODEL = llama_model(MODEL_CONFIG)


def small_model() -> Model:
    """Return the model, for processes that get its name."""
    return MODEL


def stage(node: str, devices: tuple[int, ...], layers: tuple[int, int], ahead: int):
    return Stage(
        node=node,
        devices=devices,
        mesh=StageMesh(tensor=len(devices)),
        layers=layers,
        launch_ahead=ahead,
    )


def plan(*replicas: Replica) -> Plan:
    return Plan(
        model="small",
        fingerprint=fingerprint(MODEL),
        seq_len=16,
        global_batch=6,
        replicas=replicas,
    )


# two replicas, one with two stages and one with TP 2, uneven microbatches
TWO_REPLICAS = plan(
    Replica(
        num_microbatches=2,
        microbatch_size=2,
        stages=(stage("h20-0", (0,), (0, 1), 2), stage("h20-0", (1,), (1, 4), 1)),
    ),
    Replica(
        num_microbatches=1,
        microbatch_size=2,
        stages=(stage("a100-0", (0, 1), (0, 4), 1),),
    ),
)
# one replica, three stages, other cuts, TP in another stage
ONE_REPLICA = plan(
    Replica(
        num_microbatches=3,
        microbatch_size=2,
        stages=(
            stage("v100-0", (0,), (0, 2), 3),
            stage("a100-0", (0, 1), (2, 3), 2),
            stage("h20-0", (0,), (3, 4), 1),
        ),
    )
)

ONE_STAGE = plan(
    Replica(
        num_microbatches=2,
        microbatch_size=3,
        stages=(stage("h20-0", (0,), (0, 4), 1),),
    )
)


def small_preset(directory: Path, of: Plan = TWO_REPLICAS) -> Preset:
    """Return a preset: its plan file in `directory`, its run in `directory`/run."""
    path, text = directory / "plan.json", directory / "text.txt"
    write_plan(path, of)
    shutil.copyfile(LICENCE, text)
    config = RunConfig(
        model="small",
        run_dir=directory / "run",
        steps=10,
        seq_len=16,
        global_batch=6,
        dtype="float32",
        planner="even",
        simulate=True,
        data=DataConfig(path=text, cache_dir=directory / "cache"),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        evaluation=EvaluationConfig(every=5, num_batches=1, sample_tokens=2),
        checkpoint=CheckpointConfig(every=0),
    )
    return Preset(summary="a test", config=config, cluster=SIX, plan=path)


def but(preset: Preset, **changes: Any) -> Preset:
    """Return the preset with other settings."""
    return replace(preset, config=replace(preset.config, **changes))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """Return the events of this name in events.jsonl."""
    found = lines(run_dir / "events.jsonl")
    return [line for line in found if line["event"] == name]


def losses(run_dir: Path) -> dict[int, tuple[float, float]]:
    """Return (loss, grad_norm) by step from metrics.jsonl; assert no repeated step."""
    trained = [line for line in lines(run_dir / "metrics.jsonl") if "loss" in line]
    assert len({line["step"] for line in trained}) == len(trained)
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in trained}
