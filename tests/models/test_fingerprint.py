# SPDX-License-Identifier: Apache-2.0
"""A model's fingerprint depends on its layers and shapes, and on nothing else."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from hetjax.models.configs import GPTConfig, LlamaConfig, RopeScaling, Routing
from hetjax.models.decoders import model_of
from hetjax.models.finetuning import LoraConfig, TrainConfig, fine_tuned
from hetjax.models.fingerprint import fingerprint

LLAMA = LlamaConfig(
    name="small",
    vocab_size=320,
    hidden_size=16,
    inner_size=32,
    num_blocks=2,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=32,
)
GPT = GPTConfig(
    name="learned",
    vocab_size=320,
    hidden_size=16,
    num_blocks=2,
    num_heads=4,
    max_seq_len=32,
)
MOE = replace(LLAMA, routing=Routing(num_experts=4, top_k=2))


def test_it_is_the_hash_of_paths_names_and_shapes_as_they_are_documented():
    def block(number: int) -> list[Any]:
        attention = {
            "k": [16, 2, 4],
            "norm.scale": [16],
            "out": [4, 4, 16],
            "q": [16, 4, 4],
            "v": [16, 2, 4],
        }
        mlp = {"down": [32, 16], "gate": [16, 32], "norm.scale": [16], "up": [16, 32]}
        path = f"block_{number:03d}"
        return [[f"{path}.attention", attention, {}], [f"{path}.mlp", mlp, {}]]

    embedding = ["embedding", {"table": [384, 16]}, {}]
    head = ["head", {"norm.scale": [16]}, {"table": "embedding.table"}]
    layers = [[embedding], block(0), block(1), [head]]
    text = json.dumps(layers, separators=(",", ":"), sort_keys=True)
    by_hand = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert fingerprint(model_of(replace(LLAMA, tied=True))) == by_hand


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (LLAMA, {"name": "Own-0.6B"}),
        (LLAMA, {"vocab_size": 310}),  # padded to the same 384 rows
        (LLAMA, {"max_seq_len": 64}),  # rotary positions: no parameter has its length
        (LLAMA, {"rope_theta": 1e6}),
        (LLAMA, {"window": 8, "activation": "gelu", "embedding_scale": 4.0}),
        (LLAMA, {"rope_blocks": (True, False), "residual_scale": 0.2}),
        (LLAMA, {"logit_divisor": 8.0}),
        (MOE, {"routing": Routing(num_experts=4, top_k=1, capacity_factor=None)}),
    ],
)
def test_what_changes_no_shape_does_not_change_it(config: Any, change: dict[str, Any]):
    changed = model_of(replace(config, **change))
    assert fingerprint(changed) == fingerprint(model_of(config))


@pytest.mark.parametrize(
    ("train", "lora"),
    [
        (TrainConfig(only="head"), LoraConfig()),
        (TrainConfig(label_smoothing=0.1, z_loss=1e-4), LoraConfig()),
        (TrainConfig(), LoraConfig(rank=4)),
        (TrainConfig(), LoraConfig(rank=4, frozen="int8")),
        (TrainConfig(), LoraConfig(rank=4, frozen="nf4")),
    ],
)
@pytest.mark.parametrize("config", [LLAMA, GPT, MOE])
def test_a_fine_tuned_model_is_the_same_model(
    config: Any, train: TrainConfig, lora: LoraConfig
):
    model = model_of(config)
    assert fingerprint(fine_tuned(model, train, lora)) == fingerprint(model)


def test_what_changes_layers_or_shapes_changes_it():
    changes: list[tuple[Any, dict[str, Any]]] = [
        (LLAMA, {}),
        (LLAMA, {"num_blocks": 3}),
        (LLAMA, {"hidden_size": 32}),
        (LLAMA, {"inner_size": 40}),
        (LLAMA, {"num_kv_heads": 4}),
        (LLAMA, {"head_size": 8}),
        (LLAMA, {"vocab_size": 400}),
        (LLAMA, {"tied": True}),
        (LLAMA, {"biases": "qkv"}),
        (LLAMA, {"biases": "all"}),
        (LLAMA, {"mlp_biases": True}),
        (LLAMA, {"qk_norm": True}),
        (LLAMA, {"norms": "around"}),
        (LLAMA, {"grain": "half"}),
        (MOE, {}),
        (MOE, {"routing": Routing(num_experts=8, top_k=2)}),
        (GPT, {}),
        (GPT, {"max_seq_len": 64}),  # learned positions: the length is a shape
    ]
    models = [model_of(replace(config, **change)) for config, change in changes]
    assert len(set(map(fingerprint, models))) == len(changes)


def test_scaled_positions_are_no_layer():
    scaling = RopeScaling(kind="linear", factor=8.0)
    scaled = model_of(replace(LLAMA, rope_scaling=scaling))
    assert fingerprint(scaled) == fingerprint(model_of(LLAMA))
