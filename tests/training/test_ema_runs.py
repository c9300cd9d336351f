# SPDX-License-Identifier: Apache-2.0
"""The average of a run's weights, exported and in use, across a change of plans.

The oracle is the closed form over the weights that the run saved after each step.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from hetjax.api.trained_model import TrainedModel
from hetjax.errors import BadInput
from hetjax.eval import main as evaluate
from hetjax.export import main as export
from hetjax.models.hugging_face.known_families import fields_of
from hetjax.models.hugging_face.written import write_model
from hetjax.plans.plan_files import write_plan
from hetjax.training.run_model import run_model
from hetjax.training.session import run
from hetjax.training.settings.presets import Preset
from tests.training.small import MODEL_CONFIG, ONE_REPLICA, but, small_preset

pytestmark = pytest.mark.usefixtures("quick_compiling")

DECAY, STEPS = 0.75, 3


def trained(chosen: Preset) -> int:
    return run(chosen.config, chosen, run_model(chosen.config))


def exported(run_dir: Path, to: Path, *options: str) -> dict[str, np.ndarray]:
    assert export([str(run_dir), "--to", str(to), *options]) == 0
    return load_file(to / "model.safetensors")


def test_an_average_is_exported_scored_and_kept_over_a_change_of_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    base = tmp_path / "base"
    base.mkdir()
    rng = np.random.default_rng(0)
    write_model(
        base,
        MODEL_CONFIG,
        fields_of(MODEL_CONFIG),
        lambda _, shape: rng.normal(0, 0.2, shape).astype(np.float32),
        "float32",
    )
    chosen = but(small_preset(tmp_path), model=str(base), init=str(base), steps=STEPS)
    config = chosen.config
    chosen = but(
        chosen,
        stop_after=2,
        optimizer=replace(config.optimizer, ema=DECAY),
        checkpoint=replace(config.checkpoint, every=1, keep=STEPS),
    )
    assert trained(chosen) == 4
    other = tmp_path / "other.json"
    write_plan(other, replace(ONE_REPLICA, model=str(base)))
    assert trained(but(chosen, stop_after=None, plan=other)) == 0
    run_dir = config.run_dir
    were = [load_file(base / "model.safetensors")]
    for step in range(1, STEPS + 1):
        were.append(exported(run_dir, tmp_path / f"{step}", "--step", f"{step}"))
    found = exported(run_dir, tmp_path / "average", "--ema")
    assert found.keys() == were[0].keys()
    for name, average in found.items():
        values = [np.float64(weights[name]) for weights in were]
        expected = DECAY**STEPS * values[0] + (1 - DECAY) * sum(
            DECAY ** (STEPS - k) * values[k] for k in range(1, STEPS + 1)
        )
        np.testing.assert_allclose(average, expected, rtol=1e-5, atol=1e-7)
        assert not np.allclose(average, values[-1], rtol=1e-4), name
    text = config.data.path
    assert text is not None
    ours = TrainedModel(run_dir, ema=True, platform="cpu").evaluate(text)
    assert ours == TrainedModel(tmp_path / "average", platform="cpu").evaluate(text)
    assert ours != TrainedModel(run_dir, platform="cpu").evaluate(text)
    capsys.readouterr()
    with pytest.raises(BadInput, match="optimizer.ema = 0.0 "):
        trained(but(chosen, optimizer=config.optimizer))
    assert evaluate([str(base), "--ema", "--data", str(text)]) == 2
    assert "--ema for" in capsys.readouterr().err
