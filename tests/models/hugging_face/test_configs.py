# SPDX-License-Identifier: Apache-2.0
"""A `config.json` as on the hub, and impossible ones."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetjax.errors import BadInput
from hetjax.models.configs import LlamaConfig
from hetjax.models.hugging_face.configs import config_of, read_config
from hetjax.models.hugging_face.known_families import fields_of
from hetjax.models.presets import PUBLISHED, model_config

FIXTURES = Path(__file__).parent / "fixtures"
FOLDERS = sorted(FIXTURES.iterdir())
DROPOUT = {"gpt2": ["attn_pdrop", "embd_pdrop", "resid_pdrop"]}
# the fields of google/gemma-3-4b-pt and -12b-pt: the rest is transformers' default
GEMMA_WITH_EYES = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152},
}
OF_12B = {
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
}


@pytest.mark.parametrize(("preset", "own"), [("gemma3-4b", {}), ("gemma3-12b", OF_12B)])
def test_what_reads_of_a_gemma_with_eyes_is_its_preset(
    preset: str, own: dict[str, Any], tmp_path: Path
):
    text = GEMMA_WITH_EYES["text_config"] | own
    told = json.dumps(GEMMA_WITH_EYES | {"text_config": text})
    (tmp_path / "config.json").write_text(told)
    config, fields = read_config(tmp_path)
    assert replace(config, name=preset) == model_config(preset)
    assert fields["model_type"] == "gemma3_text"
    assert fields["architectures"] == ["Gemma3ForCausalLM"]
    assert (fields["eos_token_id"], fields["torch_dtype"]) == ([1, 106], "bfloat16")


@pytest.mark.parametrize(
    ("family", "change", "got", "allowed"),
    [
        ("llama3", {"hidden_size": "64"}, "hidden_size = '64'", "a whole number"),
        ("llama3", {"head_dim": 8.0}, "head_dim = 8.0", "a whole number"),
        ("llama3", {"num_hidden_layers": True}, "num_hidden_layers", "a whole number"),
        ("llama3", {"head_dim": 7}, "heads of size 7", "an even size"),
        ("llama3", {"rms_norm_eps": "small"}, "rms_norm_eps", "a number above 0"),
        ("llama3", {"tie_word_embeddings": "no"}, "tie_word_", "true or false"),
        ("llama3", {"rope_parameters": [1]}, "rope_parameters = [1]", "an object"),
        ("llama3", {"rope_parameters": {"rope_theta": -1}}, "rope_theta", "above 0"),
        ("llama3", {"model_type": ["llama"]}, "model_type", "gemma3, gemma3_text"),
        ("gemma3", {"layer_types": 3}, "layer_types = 3", "a list of full_attention"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types", "one kind for"),
        ("gemma3", {"layer_types": ["chunked"] * 3}, "layer_types", "a list of full"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar", "above 0"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit", "None"),
        ("gemma3", {"model_type": "gemma3"}, "model_type 'None'", "gemma3_text"),
        ("qwen3_moe", {"num_experts": "8"}, "num_experts = '8'", "a whole number"),
        ("qwen3_moe", {"router_aux_loss_coef": -1}, "router_aux_loss", "0 or more"),
    ],
)
def test_a_field_that_cannot_be_is_refused_by_its_name(
    family: str, change: dict[str, Any], got: str, allowed: str, tmp_path: Path
):
    fields = json.loads((FIXTURES / family / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(BadInput) as error:
        read_config(tmp_path)
    assert got in error.value.got
    assert allowed in error.value.allowed


@pytest.mark.parametrize("family", ["qwen2", "mistral", "mixtral"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_family_that_reads_no_field_of_biases_has_its_own(family: str, bias: bool):
    """Qwen 2 has biases of queries, keys and values only, the others have none."""
    fields = json.loads((FIXTURES / family / "config.json").read_text())
    expected = config_of(fields, "a")
    assert config_of(fields | {"attention_bias": bias}, "a") == expected
    assert isinstance(expected, LlamaConfig)
    assert expected.biases == ("qkv" if family == "qwen2" else "none")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma3"])
def test_biases_that_a_family_reads_and_we_lack_are_refused(family: str):
    fields = json.loads((FIXTURES / family / "config.json").read_text())
    with pytest.raises(BadInput, match="attention_bias = True"):
        config_of(fields | {"attention_bias": True}, "a")


def test_null_is_no_field_that_is_left_out():
    fields = json.loads((FIXTURES / "mistral" / "config.json").read_text())
    assert _window(fields | {"sliding_window": None}) is None
    del fields["sliding_window"]
    assert _window(fields) == 4096


def _window(fields: dict[str, Any]) -> int | None:
    config = config_of(fields, "a")
    assert isinstance(config, LlamaConfig)
    return config.window


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_field_is_read_or_named_once_as_left_out(folder: Path, tmp_path: Path):
    raw = json.loads((folder / "config.json").read_text())
    odd = {"alibi": True, "rope_parameters": {**raw.get("rope_parameters", {}), "x": 2}}
    expected = ["alibi", "rope_parameters", "rope_parameters.x"]
    expected.remove("rope_parameters" if "rope_parameters" in raw else expected[2])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw | odd | {"alibi_slopes": None, "clip_qkv": 0}))
    with pytest.warns(UserWarning) as heard:
        config, _ = read_config(path)
        assert read_config(path)[0] == config
    (warning,) = heard
    named = sorted([*expected, *DROPOUT.get(folder.name, [])])
    words = f"not support {', '.join(named)} of its config.json and ignores them"
    assert words in str(warning.message)
    assert config == config_of(raw, config.name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_of_published_sizes_all_fields_are_read(name: str, tmp_path: Path):
    fields = fields_of(model_config(name))
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_config(tmp_path / "config.json")
