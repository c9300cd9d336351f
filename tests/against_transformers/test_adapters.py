# SPDX-License-Identifier: Apache-2.0
"""Adapters as PEFT loads them: our logits, from its model and from the merged one."""

from pathlib import Path

import numpy as np
import pytest
import transformers as hf
from peft import PeftModel

from hetjax.models.adapters import merged_weight
from hetjax.models.finetuning import LoraConfig, with_adapters
from hetjax.models.hugging_face.adapters_written import write_adapters
from hetjax.models.hugging_face.configs import read_config
from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.models.hugging_face.written import write_model
from hetjax.models.model import Model
from hetjax.models.named import load_named
from tests.against_transformers.families import (
    CONFIGS,
    logits,
    random_model,
    random_tokens,
)
from tests.models.hugging_face import whole
from tests.runtime.random_weights import random_params

RANK, ALPHA = 3, 4.5
SOME = r"block_00[02]\.(attention\.(q|v|out)|mlp\.up)"


class Adapted:
    """Weights of a folder, random ones of adapters."""

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
    assert np.abs(plain - expected).max() > 0.1
    adapted = PeftModel.from_pretrained(theirs, alone).eval()
    np.testing.assert_allclose(logits(adapted, tokens_BL), expected, atol=1e-4)
    loaded = hf.AutoModelForCausalLM.from_pretrained(one, attn_implementation="eager")
    np.testing.assert_allclose(logits(loaded.eval(), tokens_BL), expected, atol=1e-4)
