# SPDX-License-Identifier: Apache-2.0
"""What we write is loaded by transformers: no key too few or too many, same logits."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf

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
