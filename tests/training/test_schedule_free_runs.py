# SPDX-License-Identifier: Apache-2.0
"""Runs whose optimizer is evaluated at other weights than it trains.

They resume bit for bit, and the evaluation weights are exported and used.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from hetjax.api.run_checkpoints import open_checkpoint
from hetjax.api.trained_model import TrainedModel
from hetjax.errors import BadInput
from hetjax.export import main as export
from hetjax.models.finetuning import LoraConfig
from hetjax.models.hugging_face.known_families import fields_of
from hetjax.models.hugging_face.written import write_model
from hetjax.optimizers.optimizer import optimizer
from hetjax.optimizers.settings import OptimizerConfig
from hetjax.runtime.execution.updates.evaluated_weights import evaluated_weights
from hetjax.training.run_model import run_model
from hetjax.training.session import run
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.presets import Preset
from tests.training.small import (
    MODEL_CONFIG,
    TWO_REPLICAS,
    but,
    lines,
    small_preset,
)

pytestmark = pytest.mark.usefixtures("quick_compiling")

BETA = 0.8
RULE = OptimizerConfig(
    name="schedule-free",
    learning_rate=1e-2,
    warmup_steps=2,
    schedule="constant",
    beta1=BETA,
)


def preset_in(folder: Path, **changes: Any) -> Preset:
    """Return a run of four steps that starts with weights that no seed gives."""
    model = folder / "model"
    model.mkdir(parents=True)
    rng = np.random.default_rng(0)
    write_model(
        model,
        MODEL_CONFIG,
        fields_of(MODEL_CONFIG),
        lambda _, shape: rng.normal(0, 0.2, shape).astype(np.float32),
        "float32",
    )
    plan = replace(TWO_REPLICAS, model=str(model), fingerprint=None)
    given = {"model": str(model), "init": str(model), "steps": 4, "optimizer": RULE}
    chosen = small_preset(folder, plan)
    looks = replace(chosen.config.evaluation, every=2)
    return but(chosen, **given, evaluation=looks, **changes)


def trained(chosen: Preset) -> int:
    return run(chosen.config, chosen, run_model(chosen.config))


def saved_state(config: RunConfig) -> dict[str, np.ndarray]:
    with open_checkpoint(config, None) as checkpoint:
        return {name: checkpoint.read(e) for name, e in checkpoint.entries.items()}


def by_hand(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return x of y = (1 - beta1) z + beta1 x, by the path of the parameter."""
    paths = [name.removeprefix("params.") for name in state if name[:7] == "params."]
    found = {}
    for path in paths:
        y, z = (np.float64(state[f"{kind}.{path}"]) for kind in ("params", "opt.z"))
        found[path] = (y - (1 - BETA) * z) / BETA
    return found


def test_a_run_goes_on_bit_for_bit_and_exports_what_it_evaluates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    whole, parted = (preset_in(tmp_path / name) for name in ("whole", "parted"))
    assert trained(whole) == 0
    assert trained(but(parted, stop_after=2)) == 4
    with pytest.raises(BadInput, match=r"optimizer.beta1 = 0.9 \(was 0.8\)"):
        trained(but(parted, optimizer=replace(RULE, beta1=0.9)))
    assert trained(parted) == 0
    ours, theirs = (
        [
            [line.get(key) for key in ("step", "loss", "grad_norm", "val_loss")]
            for line in lines(chosen.config.run_dir / "metrics.jsonl")
        ]
        for chosen in (parted, whole)
    )
    assert ours == theirs and len(theirs) == 4 + 3
    state = saved_state(parted.config)
    run_dir, to = parted.config.run_dir, tmp_path / "exported"
    assert export([str(run_dir), "--to", str(to)]) == 0
    found = load_file(to / "model.safetensors")
    table = by_hand(state)["embedding.table"]
    np.testing.assert_allclose(
        found["model.embed_tokens.weight"], table[: MODEL_CONFIG.vocab_size], rtol=1e-5
    )
    assert not np.allclose(table, state["params.embedding.table"], rtol=1e-4)
    text = parted.config.data.path
    assert text is not None
    used = TrainedModel(run_dir, platform="cpu").evaluate(text)
    assert used == TrainedModel(to, platform="cpu").evaluate(text)
    with TrainedModel(run_dir, on="plan") as on_plan:
        assert on_plan.evaluate(text).loss == pytest.approx(used.loss, rel=1e-5)


@pytest.mark.parametrize("rank", [0, 2])
def test_each_saved_parameter_is_evaluated_where_the_formula_says(
    tmp_path: Path, rank: int
):
    chosen = preset_in(tmp_path, lora=LoraConfig(rank=rank))
    assert trained(chosen) == 0
    config, state = chosen.config, saved_state(chosen.config)
    with open_checkpoint(config, None) as checkpoint:
        init = optimizer(config.optimizer, config.steps).init
        evaluated = evaluated_weights(run_model(config), init, checkpoint.read)
        assert evaluated is not None
        for path, expected in by_hand(state).items():
            np.testing.assert_allclose(
                evaluated(path), expected, rtol=1e-5, atol=1e-7, err_msg=path
            )
