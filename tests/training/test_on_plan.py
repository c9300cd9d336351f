# SPDX-License-Identifier: Apache-2.0
"""A run's model on the run's plan finds what it finds on one device, with the weights
of the same checkpoint."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetjax.api.trained_model import TrainedModel
from hetjax.eval import main as evaluate
from hetjax.inference.scoring import Window
from hetjax.models.hugging_face.written import fields_of, write_model
from hetjax.models.named import load_named
from hetjax.plans.plan import Plan, Replica, StageMesh
from hetjax.sample import main as sample
from hetjax.training.run import run
from hetjax.training.rundir import CHECKPOINTS, LOGS, PLAN
from tests.training.small import (
    MODEL_CONFIG,
    ONE_REPLICA,
    TWO_REPLICAS,
    but,
    plan,
    small_preset,
    stage,
)

pytestmark = pytest.mark.usefixtures("quick_compiling")

# the first stage cuts its microbatches over two devices, which hold the same weights
DATA_FIRST = plan(
    Replica(
        num_microbatches=3,
        microbatch_size=2,
        stages=(
            replace(stage("a100-0", (0, 1), (0, 3), 2), mesh=StageMesh(data=2)),
            stage("h20-0", (0,), (3, 4), 1),
        ),
    )
)


def trained(folder: Path, of: Plan, **changes: Any) -> Path:
    """The directory of a run that has taken two steps, of a model with room for texts
    longer than those it learns from."""
    config, model = replace(MODEL_CONFIG, max_seq_len=64), folder / "model"
    model.mkdir(parents=True)
    fields = fields_of(config)
    write_model(model, config, fields, lambda _, shape: np.zeros(shape), "float32")
    chosen = but(small_preset(folder, of), model=str(model), steps=2, **changes)
    assert run(chosen.config, chosen, load_named(str(model))) == 0
    return chosen.config.run_dir


def windows() -> list[Window]:
    """Of many lengths, with few and many tokens that count."""
    rng, found = np.random.default_rng(3), list[Window]()
    for number in range(8):
        length = int(rng.integers(2, 40))
        counted = [False, True, *(rng.random(length - 2) < 0.6).tolist()]
        tokens = rng.integers(0, 300, length).tolist()
        found.append(Window(tokens, counted, number))
    return found


def log_likelihoods(model: TrainedModel, given: Sequence[Window]) -> list[float]:
    scores = model._place.scorer(None)
    return [found for _, found in scores(given, length=40)]


def one_device(run_dir: Path, **asked: Any) -> TrainedModel:
    return TrainedModel(run_dir, on="one-device", dtype="float32", **asked)


def check_same(run_dir: Path) -> None:
    """Tokens are equal, log-likelihoods to 1e-5."""
    with TrainedModel(run_dir, on="plan") as ours, one_device(run_dir) as theirs:
        found, expected = (log_likelihoods(m, windows()) for m in (ours, theirs))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        for prompt, length in (("Licen", 9), ("in this case, or not" * 2, 20)):
            texts = [
                m.sample(prompt, num_tokens=length, temperature=0).tokens
                for m in (ours, theirs)
            ]
            assert texts[0] == texts[1]
        drawn = [m.sample("A", num_tokens=12, seed=5).tokens for m in (ours, theirs)]
        assert drawn[0] == drawn[1]


@pytest.mark.parametrize("of", [TWO_REPLICAS, ONE_REPLICA, DATA_FIRST])
def test_stages_find_what_one_device_finds(tmp_path: Path, of: Plan):
    check_same(trained(tmp_path, of))
