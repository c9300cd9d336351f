# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 for text, and the text part of Gemma 3 with vision.

It has norms around attention and MLP, whose scales are stored minus one. Most blocks
have a window and a RoPE base of their own.
"""

import math
from typing import Any

from hetjax.models.configs import LlamaConfig, NormConfig
from hetjax.models.families.shared.family import Family
from hetjax.models.families.shared.fields import (
    BLOCKS,
    FULL,
    NUMBER,
    WINDOW,
    Fields,
)
from hetjax.models.families.shared.llama_fields import (
    layer_types,
    read_llama,
    windows_by_layer_types,
    written_llama,
)
from hetjax.models.families.shared.rope import read_rope, rope_fields
from hetjax.models.families.shared.tensor_rows import (
    ATTENTION,
    GATED_MLP,
    TensorRow,
    llama_table,
    within,
)

_PATTERNS = "sliding_window_pattern", "_sliding_window_pattern"
_NORMS_AROUND = {
    "attention.post_norm.scale": TensorRow(theirs="post_attention_layernorm.weight"),
    "mlp.post_norm.scale": TensorRow(theirs="post_feedforward_layernorm.weight"),
    "mlp.norm.scale": TensorRow(theirs="pre_feedforward_layernorm.weight"),
}


def _read(fields: Fields) -> LlamaConfig:
    fields.require("hidden_activation", "gelu_pytorch_tanh")
    fields.require("attn_logit_softcapping", None)
    fields.require("final_logit_softcapping", None)
    fields.require("use_bidirectional_attention", False)
    fields.require("attention_bias", False)
    return read_llama(
        fields,
        query_scale=fields["query_pre_attn_scalar"] ** -0.5,
        window=fields["sliding_window"],
        windowed=_windowed(fields),
        **_rope(fields),
        qk_norm=True,
        activation="gelu",
        norm=NormConfig(
            kind="rms", eps=fields.get("rms_norm_eps", 1e-6), around_one=True
        ),
        norms="around",
        embedding_scale=math.sqrt(fields["hidden_size"]),
    )


def _windowed(fields: Fields) -> tuple[bool, ...]:
    pattern, own_pattern = (fields.get(name) for name in _PATTERNS)
    period = pattern or own_pattern or 6
    return windows_by_layer_types(fields) or (*(True,) * (period - 1), False)


def _rope(fields: Fields) -> dict[str, Any]:
    """Return the RoPE settings; windowed blocks have their own base and no scaling."""
    parameters, window_theta = rope_fields(fields), fields["rope_local_base_freq"]
    if FULL in parameters:  # else the fields of transformers 4
        of_window = parameters.part(WINDOW)
        of_window.require("rope_type", "default")
        window_theta, parameters = of_window["rope_theta"], parameters.part(FULL)
    theta, scaling = read_rope(parameters, fields["rope_theta"])
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "window_rope_theta": window_theta,
    }


def _write(config: LlamaConfig) -> dict[str, Any] | None:
    if config.query_scale is None or config.window is None:
        return None
    written, theta = written_llama(config), config.window_rope_theta
    written["rope_parameters"] = {
        FULL: written["rope_parameters"],
        WINDOW: {"rope_type": "default", "rope_theta": theta or config.rope_theta},
    }
    return {
        **written,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(config.query_scale**-2),
        "sliding_window": config.window,
        "layer_types": layer_types(config),
        "rope_local_base_freq": theta or config.rope_theta,
    }


FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    read=_read,
    write=_write,
    tensors=llama_table({**ATTENTION, **within("mlp", GATED_MLP), **_NORMS_AROUND}),
    kinds={
        **dict.fromkeys(_PATTERNS, BLOCKS),
        "rope_local_base_freq": NUMBER,
        "query_pre_attn_scalar": NUMBER,
    },
    left_out={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4_096,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
    },
    with_eyes="gemma3",
    examples={
        "gemma3": {
            "head_dim": 8,
            "sliding_window": 5,
            "query_pre_attn_scalar": 12,
            "layer_types": [WINDOW, FULL, WINDOW],
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                WINDOW: {"rope_type": "default", "rope_theta": 1e4},
            },
        }
    },
)
