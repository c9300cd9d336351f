# SPDX-License-Identifier: Apache-2.0
"""Llama 2 to 3.3 and others of its `model_type` (SmolLM2), with or without biases."""

from typing import Any

from hetjax.models.configs import LlamaConfig
from hetjax.models.families.shared.family import Family
from hetjax.models.families.shared.fields import Fields
from hetjax.models.families.shared.llama_fields import (
    read_biases,
    read_llama,
    written_biases,
    written_llama,
)
from hetjax.models.families.shared.tensor_rows import DENSE


def _read(fields: Fields) -> LlamaConfig:
    return read_llama(fields, **read_biases(fields))


def _write(config: LlamaConfig) -> dict[str, Any]:
    return {**written_llama(config), **written_biases(config)}


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    read=_read,
    write=_write,
    tensors=DENSE,
    without_effect=("is_llama_config",),
    examples={
        "llama2": {},
        "llama3": {
            "head_dim": 8,
            "rope_parameters": _LLAMA3,
            "tie_word_embeddings": True,
        },
        "llama_biased": {"attention_bias": True, "mlp_bias": True},
    },
)
