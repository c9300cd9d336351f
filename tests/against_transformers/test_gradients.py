# SPDX-License-Identifier: Apache-2.0
"""Where some targets are masked: the loss and the norm of the gradient that torch has,
on a plan of unlike replicas."""

from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from hetjax.data.windows import UNCOUNTED
from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.models.named import load_named
from hetjax.runtime.execution.stage_runtime import StageRuntime
from tests.against_transformers.families import CONFIGS, random_model, random_tokens
from tests.runtime.oracle import keep_gradients
from tests.runtime.test_imported import plan

pytestmark = pytest.mark.usefixtures("quick_compiling")


def torchs(model: torch.nn.Module, inputs_BL: np.ndarray, targets_BL: np.ndarray):
    """The loss over targets that count, and the norm of its gradient."""
    logits_BLV = model(torch.from_numpy(inputs_BL.astype(np.int64))).logits
    targets = torch.from_numpy(targets_BL.astype(np.int64)).flatten()
    loss = cross_entropy(logits_BLV.flatten(0, 1), targets, ignore_index=UNCOUNTED)
    loss.backward()
    squares = [(p.grad**2).sum() for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.stack(squares).sum().sqrt().item()


@pytest.mark.parametrize("family", CONFIGS)
def test_masked_loss_and_norm_of_its_gradient_are_those_of_torch(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make = CONFIGS[family]

    def without_balance_loss():
        config = make()
        config.router_aux_loss_coef = 0.0
        return config

    monkeypatch.setitem(CONFIGS, family, without_balance_loss)
    # of a token that pads (Gemma's 0) torch leaves the gradient of its row out
    theirs, tokens_BL = random_model(family), np.maximum(random_tokens(), 1)
    theirs.save_pretrained(tmp_path)
    inputs_BL, targets_BL = tokens_BL[:, :-1], tokens_BL[:, 1:].copy()
    targets_BL[0, :11] = UNCOUNTED  # replicas have 5 and 16 that count
    model = load_named(str(tmp_path))
    runtime = StageRuntime(
        plan(len(model.layers)),
        model,
        {"a": jax.devices()[:2], "b": jax.devices()[2:4]},
        keep_gradients(),
        weights=FolderWeights(tmp_path),
    )
    runtime.initialise(0)
    found = runtime.step(0, (inputs_BL, targets_BL))
    loss, norm = torchs(theirs, inputs_BL, targets_BL)
    assert found.loss() == pytest.approx(loss, rel=1e-5)
    assert found.grad_norm == pytest.approx(norm, rel=1e-5)
