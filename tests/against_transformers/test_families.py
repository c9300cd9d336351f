# SPDX-License-Identifier: Apache-2.0
"""Each file of `hetjax/models/families` against transformers: logits, gradients on a
plan of unlike replicas, weights read and written, adapters. Finds the files itself."""

from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers as hf
from peft import PeftModel
from torch.nn.functional import cross_entropy

from hetjax.data.windows import UNCOUNTED
from hetjax.models import families
from hetjax.models.finetuning import LoraConfig, with_adapters
from hetjax.models.hugging_face import written
from hetjax.models.hugging_face.adapters_written import write_adapters
from hetjax.models.hugging_face.configs import read_config
from hetjax.models.hugging_face.known_families import fields_of, known_families
from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.models.hugging_face.written import write_model
from hetjax.models.linear.adapters import merged_weight
from hetjax.models.model import Model
from hetjax.models.named import load_named
from hetjax.runtime.execution.stage_runtime import StageRuntime
from tests.against_transformers.families import (
    CONFIGS,
    logits,
    random_model,
    random_tokens,
)
from tests.models.hugging_face import whole
from tests.runtime.oracle import keep_gradients
from tests.runtime.random_weights import random_params
from tests.runtime.test_imported import plan

pytestmark = pytest.mark.usefixtures("quick_compiling")

RANK, ALPHA = 3, 4.5
SOME = r"block_00[02]\.(attention\.(q|v|out)|mlp\.up)"


def test_each_file_is_a_family_that_has_a_tiny_model():
    folder = Path(families.__path__[0])
    files = {file.stem for file in folder.glob("*.py")} - {"__init__"}
    found = known_families()
    assert len(files) == len(found)
    assert {make().model_type for make in CONFIGS.values()} == found.keys()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_those_of_transformers(family: str, seed: int, tmp_path: Path):
    model, tokens_BL = random_model(family, seed), random_tokens(seed)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    ours = load_named(str(tmp_path))
    params = whole.parameters(ours, FolderWeights(tmp_path))
    found_BLV = whole.logits(ours, params, tokens_BL)
    np.testing.assert_allclose(found_BLV, logits(model, tokens_BL), atol=1e-4)


def torchs(model: torch.nn.Module, inputs_BL: np.ndarray, targets_BL: np.ndarray):
    """Return the loss over counted targets, and the norm of its gradient."""
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
    # torch leaves out the row gradient of the padding token (Gemma's 0)
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


@pytest.mark.parametrize("own_fields", [False, True], ids=["theirs", "ours"])
@pytest.mark.parametrize("family", CONFIGS)
def test_transformers_loads_what_we_write(
    family: str, own_fields: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(written, "FILE_BYTES", 10_000)
    model, tokens_BL = random_model(family), random_tokens()
    source, target = tmp_path / "in", tmp_path / "out"
    target.mkdir()
    model.save_pretrained(source)
    config, fields = read_config(source)
    fields = fields_of(config) if own_fields else fields
    write_model(target, config, fields, FolderWeights(source), "float32")
    loaded, told = hf.AutoModelForCausalLM.from_pretrained(
        target, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(told.values()), told
    assert loaded.dtype == torch.float32
    np.testing.assert_allclose(
        logits(loaded.eval(), tokens_BL), logits(model, tokens_BL), atol=1e-6
    )


class Adapted:
    """Weights of a folder, with random adapters."""

    def __init__(self, folder: Path, model: Model) -> None:
        self._own, self._adapters = FolderWeights(folder), random_params(model, 5)

    def __call__(self, path: str, shape: tuple[int, ...]) -> np.ndarray:
        return self._adapters[path] if "_lora_" in path else self._own(path, shape)

    def merged(self, path: str, shape: tuple[int, ...]) -> np.ndarray:
        value = self._own(path, shape)
        if f"{path}_lora_a" not in self._adapters:
            return value
        a, b = (self._adapters[f"{path}_lora_{x}"] for x in "ab")
        return merged_weight(value, a, b, ALPHA / RANK)


@pytest.mark.parametrize("targets", [None, SOME], ids=["all", "some"])
@pytest.mark.parametrize("family", CONFIGS)
def test_peft_and_the_merged_model_give_our_logits(
    family: str, targets: str | None, tmp_path: Path
):
    source, alone, one = (tmp_path / name for name in ("in", "alone", "one"))
    alone.mkdir()
    one.mkdir()
    tokens_BL = random_tokens()
    random_model(family).save_pretrained(source)
    config, fields = read_config(source)
    lora = LoraConfig(rank=RANK, alpha=ALPHA, targets=targets)
    model = with_adapters(load_named(str(source)), lora)
    weights, fp32 = Adapted(source, model), np.dtype(np.float32)
    kind, base = fields["model_type"], str(source)
    write_adapters(alone, config, kind, model, lora, weights, fp32, base)
    write_model(one, config, fields, weights.merged, "float32")
    expected = whole.logits(model, whole.parameters(model, weights), tokens_BL)
    theirs = hf.AutoModelForCausalLM.from_pretrained(
        source, attn_implementation="eager"
    )
    plain = logits(theirs.eval(), tokens_BL)
    assert np.abs(plain - expected).max() > 0.01 * np.ptp(plain)
    adapted = PeftModel.from_pretrained(theirs, alone).eval()
    np.testing.assert_allclose(logits(adapted, tokens_BL), expected, atol=1e-4)
    loaded = hf.AutoModelForCausalLM.from_pretrained(one, attn_implementation="eager")
    np.testing.assert_allclose(logits(loaded.eval(), tokens_BL), expected, atol=1e-4)
