# SPDX-License-Identifier: Apache-2.0
"""Transformers loads what we write: no key too few or too many, same logits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf

from hetjax.models.configs import DecoderConfig, LlamaConfig
from hetjax.models.hugging_face.configs import config_of, read_config
from hetjax.models.hugging_face.known_families import fields_of
from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.models.hugging_face.written import write_model
from tests.against_transformers.families import (
    CONFIGS,
    logits,
    random_tokens,
)


@pytest.mark.parametrize("family", ["llama3", "gemma3", "qwen3"])
def test_the_words_of_transformers_4_say_the_same(family: str, tmp_path: Path):
    CONFIGS[family]().save_pretrained(tmp_path)
    before, _ = read_config(tmp_path)
    old = fields_of(before)
    del old["rope_parameters"]
    assert config_of(old, before.name) == before


@pytest.mark.parametrize(
    "family",
    ["gemma3", "granite", "llama2", "mistral", "mixtral", "qwen2", "qwen3", "smollm3"],
)
def test_fields_that_are_left_out_are_those_of_transformers(
    family: str, tmp_path: Path
):
    kind = CONFIGS[family]().model_type
    few = {
        "vocab_size": 37,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "max_position_embeddings": 64,
    }
    few |= {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 8}
    few |= {"router_aux_loss_coef": 0.0}
    if family in ("mistral", "mixtral", "smollm3"):
        del few["num_key_value_heads"]
    if family == "smollm3":
        few["pad_token_id"] = 0
    hf.AutoConfig.for_model(kind, **few).save_pretrained(tmp_path)
    whole, _ = read_config(tmp_path)
    found = config_of({"model_type": kind, **few}, whole.name)
    assert _with_head_size(found) == _with_head_size(whole)


def _with_head_size(config: DecoderConfig) -> DecoderConfig:
    assert isinstance(config, LlamaConfig)
    return replace(config, head_size=config.size_of_heads)


def test_of_a_model_with_eyes_what_reads_goes_in_and_comes_out(tmp_path: Path):
    text, tokens_BL = CONFIGS["gemma3"](), random_tokens()
    eyes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    eyes |= {"num_attention_heads": 1, "image_size": 28, "patch_size": 14}
    config = hf.Gemma3Config(text_config=text.to_dict(), vision_config=eyes)
    torch.manual_seed(0)
    model = hf.Gemma3ForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "in")
    (tmp_path / "out").mkdir()
    sizes, fields = read_config(tmp_path / "in")
    read = FolderWeights(tmp_path / "in")
    write_model(tmp_path / "out", sizes, fields, read, "float32")
    loaded, told = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(told.values()), told
    assert type(loaded) is hf.Gemma3ForCausalLM
    np.testing.assert_allclose(
        logits(loaded.eval(), tokens_BL), logits(model.eval(), tokens_BL), atol=1e-5
    )
