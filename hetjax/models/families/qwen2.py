# SPDX-License-Identifier: Apache-2.0
"""Qwen 2 and 2.5: Llama with biases of only queries, keys and values, and a window in
the blocks from `max_window_layers` on."""

from typing import Any

from hetjax.models.configs import LlamaConfig
from hetjax.models.families.shared.family import Family
from hetjax.models.families.shared.fields import Fields
from hetjax.models.families.shared.llama_fields import (
    Windows,
    read_llama,
    read_windows,
    written_llama,
    written_windows,
)
from hetjax.models.families.shared.tensor_rows import DENSE


def late_windows(fields: Fields) -> Windows:
    """Return which blocks have a window: those from `max_window_layers` on."""
    first = fields.get("max_window_layers", 28)
    return tuple(block >= first for block in range(fields["num_hidden_layers"]))


def _read(fields: Fields) -> LlamaConfig:
    return read_llama(
        fields, biases="qkv", **read_windows(fields, late_windows(fields))
    )


def _write(config: LlamaConfig) -> dict[str, Any]:
    return {**written_llama(config), **written_windows(config)}


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    read=_read,
    write=_write,
    tensors=DENSE,
    without_effect=("attention_bias", "mlp_bias"),  # its biases are fixed
    examples={
        "qwen2": {"tie_word_embeddings": True},
        "qwen2_window": {
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
    },
)
