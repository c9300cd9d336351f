# SPDX-License-Identifier: Apache-2.0
"""A run's checkpoint in use equals the run's export."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from hetjax.api.exporting import export_model
from hetjax.api.trained_model import TrainedModel
from hetjax.models.hugging_face.known_families import fields_of
from hetjax.models.hugging_face.written import write_model
from hetjax.models.named import load_named
from hetjax.sample import main as sample
from hetjax.training.directory.rundir import CHECKPOINTS
from hetjax.training.session import run
from tests.training.small import MODEL_CONFIG, but, small_preset

pytestmark = pytest.mark.usefixtures("quick_compiling")


def test_a_run_is_sampled_and_scored_as_what_it_exports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model = tmp_path / "model"
    model.mkdir()
    fields = fields_of(MODEL_CONFIG)
    write_model(
        model, MODEL_CONFIG, fields, lambda _, shape: np.zeros(shape), "float32"
    )
    chosen = but(small_preset(tmp_path), model=str(model), steps=2)
    run_dir, text = chosen.config.run_dir, chosen.config.data.path
    assert run(chosen.config, chosen, load_named(str(model))) == 0
    export_model(run_dir, tmp_path / "out")
    ours, theirs = (TrainedModel(path) for path in (run_dir, tmp_path / "out"))
    assert text is not None and ours.evaluate(text) == theirs.evaluate(text)
    texts = [m.sample("Licen", num_tokens=9).tokens for m in (ours, theirs)]
    assert texts[0] == texts[1]
    capsys.readouterr()
    assert sample([str(run_dir), "--step", "1"]) == 2
    assert "no complete checkpoint of step 1" in capsys.readouterr().err
    assert sample([str(run_dir), "--ema"]) == 2
    told = capsys.readouterr().err
    assert all(part in told for part in ("got: --ema", "allowed:", "ema 0.999"))
    shutil.rmtree(run_dir / CHECKPOINTS)
    assert sample([str(run_dir)]) == 2
    told = capsys.readouterr().err
    assert "no complete checkpoint" in told
    assert all(part in told for part in ("got:", "allowed:", "fix:"))
