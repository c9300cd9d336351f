# SPDX-License-Identifier: Apache-2.0
"""Adapters that PEFT saved: we give its logits, and those of the merged model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model

from hetjax.errors import BadInput
from hetjax.models.hugging_face.adapter_config import base_folder
from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.models.named import load_named
from tests.against_transformers.families import (
    CONFIGS,
    logits,
    random_model,
    random_tokens,
)
from tests.models.hugging_face import whole

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "by the root": {"use_rslora": True},
    "by patterns": {
        "rank_pattern": {r"[02]\.self_attn\.q_proj": 2, "h.1.attn.c_attn": 2},
        "alpha_pattern": {"v_proj": 9, "c_fc": 9},
    },
    "of some layers": {"layers_to_transform": [1]},
}
QUERIES = {"target_modules": ["q_proj"]}
UNLIKE: dict[str, dict[str, Any]] = {
    "use_dora": {"use_dora": True, **QUERIES},
    "bias": {"bias": "lora_only", **QUERIES},
    "lora_bias": {"lora_bias": True, **QUERIES},
    "modules_to_save": {"modules_to_save": ["lm_head"], **QUERIES},
    "trainable_token_indices": {"trainable_token_indices": [1], **QUERIES},
    "embedding": {"target_modules": ["embed_tokens"]},
}


def adapted(family: str, tmp_path: Path, **settings: Any) -> tuple[PeftModel, Path]:
    """Return a random model with random adapters, saved as PEFT saves it."""
    base = random_model(family)
    base.save_pretrained(tmp_path / "base")
    base = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", attn_implementation="eager"
    )
    is_gpt2 = family == "gpt2"
    targets = ["q_proj", "v_proj", "o_proj"]
    if family not in ("mixtral", "qwen3_moe"):
        targets += ["gate_proj", "down_proj"]
    settings = {"target_modules": ["c_attn", "c_fc"] if is_gpt2 else targets} | settings
    lora = LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **settings)
    model = get_peft_model(base, lora)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(str(tmp_path / "adapters"))
    return model.eval(), tmp_path / "adapters"


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_base_with_adapters_gives_the_logits_of_peft(
    family: str, settings: str, tmp_path: Path
):
    theirs, folder = adapted(family, tmp_path, **SETTINGS[settings])
    ours = load_named(str(base_folder(folder)))
    found_BLV = whole.logits(
        ours, whole.parameters(ours, FolderWeights(folder)), random_tokens()
    )
    np.testing.assert_allclose(found_BLV, logits(theirs, random_tokens()), atol=2e-4)
    one = theirs.merge_and_unload().eval()
    np.testing.assert_allclose(found_BLV, logits(one, random_tokens()), atol=2e-4)
    plain = whole.parameters(ours, FolderWeights(tmp_path / "base"))
    change_BLV = whole.logits(ours, plain, random_tokens()) - found_BLV
    assert np.abs(change_BLV).max() > 0.01 * np.ptp(found_BLV)


@pytest.mark.parametrize("kind", UNLIKE)
def test_what_peft_has_and_we_do_not_is_refused_by_name(kind: str, tmp_path: Path):
    _, folder = adapted("llama2", tmp_path, **UNLIKE[kind])
    with pytest.raises(BadInput) as error:
        FolderWeights(folder)
    assert kind in error.value.got
