# SPDX-License-Identifier: Apache-2.0
"""Mistral: Llama with a window in all blocks, or in none."""

from typing import Any

from hetjax.models.configs import LlamaConfig
from hetjax.models.families.shared.family import Family
from hetjax.models.families.shared.fields import Fields
from hetjax.models.families.shared.llama_fields import read_llama, written_llama
from hetjax.models.families.shared.tensor_rows import DENSE


def _read(fields: Fields) -> LlamaConfig:
    return read_llama(fields, window=fields.get("sliding_window"))


def _write(config: LlamaConfig) -> dict[str, Any]:
    return {**written_llama(config), "sliding_window": config.window}


FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    read=_read,
    write=_write,
    tensors=DENSE,
    left_out={"num_key_value_heads": 8, "sliding_window": 4_096},
    without_effect=("attention_bias", "mlp_bias"),  # it has no biases in any case
    examples={"mistral": {"sliding_window": 5}},
)
