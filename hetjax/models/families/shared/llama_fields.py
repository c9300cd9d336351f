# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the fields that Llama and its relatives share.

Does not own the other fields of a relative (its file in `families/`).
"""

from collections.abc import Sequence
from typing import Any

from hetjax.models.configs import LlamaConfig, NormConfig
from hetjax.models.families.shared.fields import FULL, WINDOW, Fields
from hetjax.models.families.shared.rope import read_rope, rope_fields, written_rope

Windows = tuple[bool, ...]  # by block: whether its positions see only a window


def read_llama(fields: Fields, **own: Any) -> LlamaConfig:
    """Return a config from the shared fields and a relative's `own` settings."""
    num_heads = fields["num_attention_heads"]
    common = dict[str, Any](
        name=fields.name,
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        inner_size=fields["intermediate_size"],
        num_blocks=fields["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=fields.get("num_key_value_heads", num_heads),
        head_size=fields.get("head_dim"),
        max_seq_len=fields["max_position_embeddings"],
        norm=NormConfig(kind="rms", eps=fields.get("rms_norm_eps", 1e-6)),
        tied=fields.get("tie_word_embeddings", False),
    )
    if "rope_theta" not in own:
        theta, scaling = read_rope(rope_fields(fields), fields.get("rope_theta"))
        common |= {"rope_theta": theta, "rope_scaling": scaling}
    if "activation" not in own:
        fields.require("hidden_act", "silu")
    return LlamaConfig(**common | own)


def written_llama(config: LlamaConfig) -> dict[str, Any]:
    """Return the same fields for a config of ours."""
    head_dim = {}
    if config.head_size or config.qk_norm:
        head_dim = {"head_dim": config.size_of_heads}
    silu = {"hidden_act": "silu"} if config.activation == "silu" else {}
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.inner_size,
        "num_hidden_layers": config.num_blocks,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm.eps,
        "tie_word_embeddings": config.tied,
        **silu,
        **written_rope(config.rope_theta, config.rope_scaling),
        **head_dim,
    }


def read_biases(fields: Fields) -> dict[str, Any]:
    """Return which biases there are: of attention with its output, and of the MLP."""
    attention = fields.get("attention_bias", False)
    return {
        "biases": "all" if attention else "none",
        "mlp_biases": fields.get("mlp_bias", False),
    }


def written_biases(config: LlamaConfig) -> dict[str, Any]:
    """Return the same fields, none where there are no biases."""
    biases = {"attention_bias": config.biases == "all", "mlp_bias": config.mlp_biases}
    return {name: True for name, has_some in biases.items() if has_some}


def read_windows(fields: Fields, otherwise: Windows) -> dict[str, Any]:
    """Return the window and its blocks, nothing if no window is used. The blocks are
    those of `layer_types`, or `otherwise` if that is missing."""
    if not fields.get("use_sliding_window", False):
        fields.without_effect("sliding_window", "max_window_layers", "layer_types")
        return {}
    return {
        "window": fields["sliding_window"],
        "windowed": windows_by_layer_types(fields) or otherwise,
    }


def windows_by_layer_types(fields: Fields) -> Windows:
    """Return which blocks have a window by `layer_types`; empty if that is missing."""
    kinds = fields.get("layer_types", ())
    if kinds and len(kinds) != fields["num_hidden_layers"]:
        fields.refuse(
            "layer_types", "one kind for each of the num_hidden_layers layers"
        )
    return tuple(kind == WINDOW for kind in kinds)


def layer_types(config: LlamaConfig) -> Sequence[str]:
    """Return the kind of each block."""
    blocks = range(config.num_blocks)
    return [WINDOW if config.has_window(block) else FULL for block in blocks]


def written_windows(config: LlamaConfig) -> dict[str, Any]:
    """Return the fields of a window, and whether it is used."""
    return {
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "layer_types": layer_types(config),
    }
