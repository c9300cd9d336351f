# SPDX-License-Identifier: Apache-2.0
"""Tensors that no config names: our logits are those of transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import transformers as hf
from safetensors.numpy import load_file, save_file

from hetjax.errors import BadInput
from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.models.named import load_named
from tests.against_transformers.families import (
    CONFIGS,
    logits,
    random_model,
    random_tokens,
)
from tests.models.hugging_face import whole

HEAD = "lm_head.weight"
PREFIXES = ("model.", "transformer.")


def with_head(tensors: dict[str, np.ndarray], is_equal: bool) -> None:
    ends = ("embed_tokens.weight", "wte.weight")
    table = next(value for name, value in tensors.items() if name.endswith(ends))
    other = np.random.default_rng(1).normal(size=table.shape).astype(np.float32)
    tensors[HEAD] = table.copy() if is_equal else other


def without_prefix(tensors: dict[str, np.ndarray]) -> None:
    for name in [name for name in tensors if name.startswith(PREFIXES)]:
        tensors[name.partition(".")[2]] = tensors.pop(name)


CHANGES = {
    "the same head": lambda tensors: with_head(tensors, True),
    "another head": lambda tensors: with_head(tensors, False),
    "no prefix": without_prefix,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_changed_file_gives_the_logits_of_transformers(
    family: str, change: str, tmp_path: Path
):
    random_model(family).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    CHANGES[change](tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    fields = json.loads((tmp_path / "config.json").read_text())
    if change != "no prefix":
        fields["tie_word_embeddings"] = True
        (tmp_path / "config.json").write_text(json.dumps(fields))
    theirs = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    expected_BLV = logits(theirs.eval(), random_tokens())
    ours, weights = load_named(str(tmp_path)), FolderWeights(tmp_path)
    params = whole.parameters(ours, weights)
    found_BLV = whole.logits(ours, params, random_tokens())
    np.testing.assert_allclose(found_BLV, expected_BLV, atol=1e-4)


@pytest.mark.parametrize("family", CONFIGS)
def test_what_transformers_calls_unexpected_is_refused_by_name(
    family: str, tmp_path: Path
):
    """Or both use it: then logits agree, as above."""
    random_model(family).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    zeros = np.zeros((4, 4), np.float32)
    added = {"lm_head.bias", "v_head.summary.weight", "model.layers.9.mlp.up.weight"}
    save_file(tensors | dict.fromkeys(added, zeros), file, metadata={"format": "pt"})
    _, info = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert set(info["unexpected_keys"]) == added
    with pytest.raises(BadInput) as error:
        FolderWeights(tmp_path)
    assert all(name in error.value.got for name in added)


@pytest.mark.parametrize("attention_bias", [True, False])
def test_qwen2_has_the_biases_that_it_has_whatever_its_config_says(
    attention_bias: bool, tmp_path: Path
):
    random_model("qwen2").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields |= {"attention_bias": attention_bias, "mlp_bias": attention_bias}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    theirs = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    ours, weights = load_named(str(tmp_path)), FolderWeights(tmp_path)
    found_BLV = whole.logits(ours, whole.parameters(ours, weights), random_tokens())
    expected_BLV = logits(theirs.eval(), random_tokens())
    np.testing.assert_allclose(found_BLV, expected_BLV, atol=1e-4)
