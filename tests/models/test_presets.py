# SPDX-License-Identifier: Apache-2.0
"""Presets by name, and what configs refuse."""

from dataclasses import replace
from pathlib import Path

import pytest

from hetjax.errors import BadInput
from hetjax.models.named import is_path, named_config
from hetjax.models.presets import (
    GPT2_124M,
    LLAMA3_8B,
    MIXTRAL_8X7B,
    MODEL_CONFIGS,
    TINY,
    model_config,
    model_preset,
)


def test_every_preset_lays_out_with_as_many_layers_as_blocks_and_two_ends():
    for name, config in MODEL_CONFIGS.items():
        model = model_preset(name)
        assert model.name == name
        assert len(model.layers) == config.num_blocks + 2
        assert (model.vocab_size, model.max_seq_len) == (
            config.vocab_size,
            config.max_seq_len,
        )


@pytest.mark.parametrize("name", ["tiny", "tiny-halves"])
def test_a_file_of_a_presets_name_does_not_hide_the_preset(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    (tmp_path / "own").mkdir()
    assert named_config(name) == model_config(name)
    assert not is_path(name)
    assert is_path("own") and is_path(f"./{name}")


def test_halves_cut_every_block_in_two_and_keep_the_parameters():
    whole, halves = model_preset("tiny"), model_preset("tiny-halves")
    assert len(halves.layers) == 2 * TINY.num_blocks + 2
    assert [m.path for m in halves.modules] == [m.path for m in whole.modules]


def test_an_unknown_preset_is_refused_with_the_names_and_the_nearest():
    with pytest.raises(BadInput) as error:
        model_preset("llama-3-8b")
    assert "'llama-3-8b'" in error.value.got
    assert all(name in error.value.allowed for name in MODEL_CONFIGS)
    assert "llama3-8b or llama3.1-8b" in error.value.fix


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("Llama-3.2-1B", "llama3.2-1b"),
        ("qwen3-7b", "qwen3-4b"),
        ("gemma-3-12b", "gemma3-12b"),
        ("mistral7b", "mistral-7b"),
        ("xyz", "tiny"),
    ],
)
def test_the_nearest_names_are_suggested_however_they_are_typed(typed, meant):
    with pytest.raises(BadInput) as error:
        model_preset(typed)
    assert meant in error.value.fix


@pytest.mark.parametrize(
    ("config", "change", "text"),
    [
        (TINY, {"num_heads": 5}, "num_heads = 5 does not divide hidden_size = 128"),
        (TINY, {"num_kv_heads": 3}, "num_kv_heads = 3 does not divide num_heads = 4"),
        (LLAMA3_8B, {"num_blocks": 0}, "num_blocks = 0"),
        (GPT2_124M, {"num_heads": 7}, "num_heads = 7 does not divide hidden_size"),
        (GPT2_124M, {"vocab_multiple": -1}, "vocab_multiple = -1"),
        (MIXTRAL_8X7B, {"mlp_biases": True}, "experts with mlp_biases"),
        (MIXTRAL_8X7B, {"norms": "around"}, "experts with norms 'around'"),
        (MIXTRAL_8X7B, {"residual_scale": 0.5}, "experts with a residual_scale"),
    ],
)
def test_sizes_that_cannot_be_are_refused(config, change, text):
    with pytest.raises(BadInput, match=text):
        replace(config, **change)
