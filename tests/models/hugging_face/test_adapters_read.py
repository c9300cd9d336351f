# SPDX-License-Identifier: Apache-2.0
"""PEFT adapters over a folder: numpy's sum by its formulas, or a refusal by name."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hetjax.errors import BadInput
from hetjax.models.hugging_face.adapter_config import ADAPTER_CONFIG, ADAPTERS
from hetjax.models.hugging_face.configs import read_config
from hetjax.models.hugging_face.stored_tensors import WHOLE
from hetjax.models.hugging_face.tensors import FolderWeights
from hetjax.models.named import load_named
from tests.models.hugging_face.test_fixtures import FIXTURES
from tests.models.hugging_face.whole import parameters

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj"
RANK, ALPHA = 3, 5.0


def adapters(
    folder: Path, modules: dict[str, int], base: str = "llama2", **fields: Any
) -> Path:
    """Write a PEFT folder with random adapters of these modules, each with its rank."""
    folder.mkdir()
    weights, rng = load_file(FIXTURES / base / WHOLE), np.random.default_rng(0)
    stored = {}
    for module, rank in modules.items():
        outputs, inputs = weights[f"{module}.weight"].shape
        if base == "gpt2":
            outputs, inputs = inputs, outputs
        begins = f"base_model.model.{module}"
        a, b = rng.normal(size=(rank, inputs)), rng.normal(size=(outputs, rank))
        stored[f"{begins}.lora_A.weight"] = a.astype(np.float32)
        stored[f"{begins}.lora_B.weight"] = b.astype(np.float32)
    save_file(stored, folder / ADAPTERS)
    told = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}
    told["base_model_name_or_path"] = str(FIXTURES / base)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(told | fields))
    return folder


def merged(folder: Path, to: Path, scales: dict[str, float], base: str) -> Path:
    """Write the base with each adapter's product added in float64."""
    to.mkdir()
    weights, stored = load_file(FIXTURES / base / WHOLE), load_file(folder / ADAPTERS)
    for module, scale in scales.items():
        a, b = (
            stored[f"base_model.model.{module}.lora_{x}.weight"].astype(np.float64)
            for x in "AB"
        )
        delta = scale * b @ a
        before = weights[f"{module}.weight"]
        after = before + (delta.T if base == "gpt2" else delta)
        weights[f"{module}.weight"] = np.ascontiguousarray(after, dtype=np.float32)
    save_file(weights, to / WHOLE)
    (to / "config.json").write_text((FIXTURES / base / "config.json").read_text())
    return to


def check_equal(folder: Path, to: Path, scales: dict[str, float], base: str) -> None:
    expected = merged(folder, to, scales, base)
    model = load_named(str(expected))
    ours, theirs = (
        parameters(model, FolderWeights(each)) for each in (folder, expected)
    )
    for path, params in theirs.items():
        for name, value in params.items():
            np.testing.assert_allclose(ours[path][name], value, atol=1e-5, rtol=1e-5)
    scaled = FolderWeights(folder, np.float16)("block_000.attention.q", (16, 4, 4))
    assert scaled.dtype == np.float16


PATTERNS = {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {r"2\.mlp\..*": 7.0}}


@pytest.mark.parametrize(
    ("fields", "scales"),
    [
        ({}, {Q: ALPHA / 3, DOWN: ALPHA / 3}),
        ({"use_rslora": True}, {Q: ALPHA / 3**0.5, DOWN: ALPHA / 3**0.5}),
        (PATTERNS, {Q: ALPHA / 3, DOWN: 7.0 / 2}),
        (PATTERNS | {"use_rslora": True}, {Q: ALPHA / 3**0.5, DOWN: 7.0 / 2**0.5}),
    ],
)
def test_weights_are_those_of_the_base_with_adapters_added(
    fields: dict[str, Any], scales: dict[str, float], tmp_path: Path
):
    ranks = {Q: RANK, DOWN: 2 if "rank_pattern" in fields else RANK}
    folder = adapters(tmp_path / "adapters", ranks, **fields)
    check_equal(folder, tmp_path / "merged", scales, "llama2")


def test_adapters_of_a_head_and_of_gpt2_are_added_as_their_weights_lie(tmp_path: Path):
    folder = adapters(tmp_path / "head", {"lm_head": RANK})
    check_equal(folder, tmp_path / "one", {"lm_head": ALPHA / RANK}, "llama2")
    modules = [f"transformer.h.1.{name}" for name in ("attn.c_attn", "mlp.c_proj")]
    gpt2 = adapters(tmp_path / "gpt2", dict.fromkeys(modules, RANK), "gpt2")
    check_equal(gpt2, tmp_path / "two", dict.fromkeys(modules, ALPHA / RANK), "gpt2")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"task_type": "SEQ_CLS"}, "task_type = 'SEQ_CLS'"),
        ({"use_dora": True}, "use_dora = True"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"lora_bias": True}, "lora_bias = True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = ['lm_head']"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens = [1]"),
        ({"layer_replication": [[0, 2]]}, "layer_replication = [[0, 2]]"),
        ({"target_parameters": ["a"]}, "target_parameters = ['a']"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices = [1]"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights = 'loftq'"),
        ({"nobody_knows": {"it": 1}}, "nobody_knows = {'it': 1}"),
        ({"r": "16"}, "r = '16'"),
        ({"r": 0}, "r = 0"),
        ({"r": 4}, f"for {Q} with A of shape [3, 16], B of [16, 3], rank 4"),
        ({"lora_alpha": None}, "lora_alpha = None"),
        ({"rank_pattern": {"(": 3}}, "rank_pattern '('"),
        ({"rank_pattern": [1]}, "rank_pattern = [1]"),
        ({"alpha_pattern": {"a": "b"}}, "alpha_pattern = 'b'"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path = None"),
        ({"base_model_name_or_path": "no where"}, "the base of the adapters in"),
        (
            {"base_model_name_or_path": str(FIXTURES / "gpt2")},
            f"for {Q}, which their base",
        ),
    ],
)
def test_what_our_adapters_do_not_have_is_refused_by_name(
    fields: dict[str, Any], said: str, tmp_path: Path
):
    folder = adapters(tmp_path / "adapters", {Q: RANK}, **fields)
    with pytest.raises(BadInput, match=re.escape(said)) as error:
        FolderWeights(folder)
    assert str(folder) in error.value.got and error.value.fix


def test_fields_that_change_nothing_are_read_over(tmp_path: Path):
    fields = {"target_modules": ["q_proj"], "lora_dropout": 0.1, "use_dora": False}
    fields |= {"eva_config": None, "modules_to_save": [], "fan_in_fan_out": True}
    folder = adapters(tmp_path / "adapters", {Q: RANK}, **fields)
    check_equal(folder, tmp_path / "merged", {Q: ALPHA / RANK}, "llama2")


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.embed_tokens.weight",
        "base_model.model.lm_head.modules_to_save.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        f"base_model.model.{Q}.lora_magnitude_vector",
        f"base_model.model.{Q}.lora_B.bias",
        f"base_model.model.{DOWN}.lora_A.weight",
        "base_model.model.model.layers.7.mlp.up_proj.lora_A.weight",
    ],
)
def test_a_tensor_besides_is_refused_by_name(name: str, tmp_path: Path):
    folder = adapters(tmp_path / "adapters", {Q: RANK})
    stored = load_file(folder / ADAPTERS) | {name: np.zeros((3, 16), np.float32)}
    save_file(stored, folder / ADAPTERS)
    module = name.removeprefix("base_model.model.").partition(".lora_A.")[0]
    with pytest.raises(BadInput, match=re.escape(module)):
        FolderWeights(folder)


def test_adapters_are_no_model_and_not_beside_one(tmp_path: Path):
    folder = adapters(tmp_path / "adapters", {Q: RANK})
    for _ in range(2):  # also with a config.json, which some trainers leave there
        with pytest.raises(BadInput, match="adapters of PEFT") as error:
            read_config(folder)
        assert f"--init {folder}" in error.value.fix
        config = (FIXTURES / "llama2" / "config.json").read_text()
        (folder / "config.json").write_text(config)
    (folder / WHOLE).write_bytes((FIXTURES / "llama2" / WHOLE).read_bytes())
    for read in (FolderWeights, read_config):
        with pytest.raises(BadInput, match="weights of a model and adapters"):
            read(folder)
