# SPDX-License-Identifier: Apache-2.0
"""What we write is loaded by transformers: no key too few or too many, same logits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf

from hetjax.models.configs import DecoderConfig, LlamaConfig
from hetjax.models.hugging_face import written
from hetjax.models.hugging_face.configs import config_of, read_config
from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.models.hugging_face.written import fields_of, write_model
from tests.against_transformers.families import (
    CONFIGS,
    logits,
    random_model,
    random_tokens,
)


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


@pytest.mark.parametrize("family", ["llama3", "gemma3", "qwen3"])
def test_the_words_of_transformers_4_say_the_same(family: str, tmp_path: Path):
    CONFIGS[family]().save_pretrained(tmp_path)
    before, _ = read_config(tmp_path)
    old = fields_of(before)
    del old["rope_parameters"]
    assert config_of(old, before.name) == before


@pytest.mark.parametrize("family", ["gemma3", "mistral", "mixtral", "qwen3"])
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
    if family in ("mistral", "mixtral"):
        del few["num_key_value_heads"]
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
