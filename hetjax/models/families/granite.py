# SPDX-License-Identifier: Apache-2.0
"""Granite 3: Llama with factors of embedding, scores, residual terms and logits."""

from typing import Any

from hetjax.models.configs import LlamaConfig
from hetjax.models.families.shared.family import Family
from hetjax.models.families.shared.fields import NUMBER, Fields
from hetjax.models.families.shared.llama_fields import (
    read_biases,
    read_llama,
    written_biases,
    written_llama,
)
from hetjax.models.families.shared.tensor_rows import DENSE

_FACTORS = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "query_scale",  # in place of 1 / sqrt(head_dim)
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_divisor",
}


def _read(fields: Fields) -> LlamaConfig:
    factors = {ours: fields.get(theirs, 1.0) for theirs, ours in _FACTORS.items()}
    return read_llama(fields, **factors, **read_biases(fields))


def _write(config: LlamaConfig) -> dict[str, Any] | None:
    if config.query_scale is None:
        return None
    factors = {theirs: getattr(config, ours) for theirs, ours in _FACTORS.items()}
    return {**written_llama(config), **written_biases(config), **factors}


FAMILY = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    read=_read,
    write=_write,
    tensors=DENSE,
    kinds=dict.fromkeys(_FACTORS, NUMBER),
    left_out={"vocab_size": 32_000, "max_position_embeddings": 2_048},
    examples={
        "granite": {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
            "tie_word_embeddings": True,
        },
        "granite_biased": {
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "attention_bias": True,
            "mlp_bias": True,
        },
    },
)
