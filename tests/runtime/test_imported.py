# SPDX-License-Identifier: Apache-2.0
"""Models that transformers saved: its loss on unlike replicas, and unchanged saves."""

from pathlib import Path

import jax
import numpy as np
import pytest

from hetjax.models.hugging_face.configs import read_config
from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.models.hugging_face.written import write_model
from hetjax.models.named import load_named
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh
from hetjax.runtime.execution.stage_runtime import StageRuntime
from tests.models.hugging_face.test_fixtures import FOLDERS
from tests.models.hugging_face.test_written import all_tensors
from tests.runtime.oracle import keep_gradients
from tests.short_runs import draws

pytestmark = pytest.mark.usefixtures("quick_compiling")

LENGTH = 16


def plan(num_layers: int) -> Plan:
    """Return a replica of two uneven stages, and one whose devices share each layer."""
    half = Stage(node="a", devices=(0,), layers=(0, 2), launch_ahead=2)
    rest = Stage(node="a", devices=(1,), layers=(2, num_layers), launch_ahead=1)
    whole = Stage(
        node="b",
        devices=(0, 1),
        mesh=StageMesh(tensor=2),
        layers=(0, num_layers),
        launch_ahead=1,
    )
    replicas = tuple(
        Replica(num_microbatches=1, microbatch_size=1, stages=stages)
        for stages in ((half, rest), (whole,))
    )
    return Plan(model="its", seq_len=LENGTH, global_batch=2, replicas=replicas)


def loss_of(logits_BLV: np.ndarray, tokens_BL: np.ndarray) -> float:
    """Return the nats per token, without the last position."""
    z_BLV = logits_BLV[:, :-1].astype(np.float64)
    log_BLV = z_BLV - np.log(np.exp(z_BLV).sum(-1, keepdims=True))
    return -np.take_along_axis(log_BLV, tokens_BL[:, 1:, None], -1).mean()


@pytest.mark.parametrize("folder", draws(FOLDERS, short=2), ids=lambda f: f.name)
def test_the_loss_is_that_of_transformers_and_weights_come_out_as_they_went_in(
    folder: Path, tmp_path: Path
):
    model = load_named(str(folder))
    nodes = {"a": jax.devices()[:2], "b": jax.devices()[2:4]}
    runtime = StageRuntime(
        plan(len(model.layers)),
        model,
        nodes,
        keep_gradients(),
        weights=FolderWeights(folder),
    )
    runtime.initialise(0)
    saved = {
        entry.name.removeprefix("params."): value
        for entry, value in runtime.entries()
        if entry.name.startswith("params.")
    }
    config, fields = read_config(folder)
    write_model(tmp_path, config, fields, lambda path, _: saved[path], "float32")
    before, after = all_tensors(folder), all_tensors(tmp_path)
    assert after.keys() == before.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    tokens_BL = np.load(folder / "tokens.npy")
    expected = loss_of(np.load(folder / "logits.npy"), tokens_BL)
    found = runtime.step(0, (tokens_BL[:, :-1], tokens_BL[:, 1:]))
    assert found.loss() == pytest.approx(expected, rel=1e-5)
