# SPDX-License-Identifier: Apache-2.0
"""GPT-2: learned positions, LayerNorm, biases; its linear weights have our layout."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from hetjax.models.configs import GPTConfig
from hetjax.models.families.shared.family import Family
from hetjax.models.families.shared.fields import (
    BLOCKS,
    HEADS,
    POSITIONS,
    WIDTH,
    Fields,
)
from hetjax.models.families.shared.tensor_rows import TensorRow, TensorTable

_MASK = re.compile(r"^transformer\.h\.\d+\.attn\.bias$")
_MASKED = re.compile(r"^transformer\.h\.\d+\.attn\.masked_bias$")
_MOST_MASKED = -1e4  # upper limit of what is added to scores of hidden positions


def _read(fields: Fields) -> GPTConfig:
    fields.require("activation_function", "gelu_new", "gelu_pytorch_tanh")
    fields.require("scale_attn_weights", True)
    fields.require("scale_attn_by_inverse_layer_idx", False)
    fields.require("add_cross_attention", False)
    fields.require("layer_norm_epsilon", 1e-5)
    hidden_size = fields["n_embd"]
    fields.require("n_inner", 4 * hidden_size)
    return GPTConfig(
        name=fields.name,
        vocab_size=fields["vocab_size"],
        hidden_size=hidden_size,
        num_blocks=fields["n_layer"],
        num_heads=fields["n_head"],
        max_seq_len=fields["n_positions"],
        tied=fields.get("tie_word_embeddings", True),
    )


def _write(config: GPTConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_layer": config.num_blocks,
        "n_head": config.num_heads,
        "n_positions": config.max_seq_len,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": config.tied,
    }


def _is_mask(name: str, read: Callable[[], np.ndarray]) -> bool:
    """Whether the tensor is the causal mask, or the value for masked scores."""
    if _MASKED.match(name):
        return bool(np.all(read().astype(np.float32) <= _MOST_MASKED))
    if not _MASK.match(name):
        return False
    mask = read()
    return np.array_equal(mask, np.broadcast_to(np.tri(mask.shape[-1]), mask.shape))


def _conv(name: str, inputs: int = 1, third: int | None = None) -> TensorRow:
    return TensorRow(theirs=name, inputs=inputs, transposed=False, third=third)


_BLOCK = {
    "attention.norm.scale": TensorRow(theirs="ln_1.weight"),
    "attention.norm.bias": TensorRow(theirs="ln_1.bias"),
    "attention.q": _conv("attn.c_attn.weight", third=0),
    "attention.k": _conv("attn.c_attn.weight", third=1),
    "attention.v": _conv("attn.c_attn.weight", third=2),
    "attention.q_bias": TensorRow(theirs="attn.c_attn.bias", third=0),
    "attention.k_bias": TensorRow(theirs="attn.c_attn.bias", third=1),
    "attention.v_bias": TensorRow(theirs="attn.c_attn.bias", third=2),
    "attention.out": _conv("attn.c_proj.weight", inputs=2),
    "attention.out_bias": TensorRow(theirs="attn.c_proj.bias"),
    "mlp.norm.scale": TensorRow(theirs="ln_2.weight"),
    "mlp.norm.bias": TensorRow(theirs="ln_2.bias"),
    "mlp.up": _conv("mlp.c_fc.weight"),
    "mlp.up_bias": TensorRow(theirs="mlp.c_fc.bias"),
    "mlp.down": _conv("mlp.c_proj.weight"),
    "mlp.down_bias": TensorRow(theirs="mlp.c_proj.bias"),
}
_ENDS = {
    "embedding.table": TensorRow(theirs="transformer.wte.weight"),
    "embedding.positions": TensorRow(theirs="transformer.wpe.weight"),
    "head.norm.scale": TensorRow(theirs="transformer.ln_f.weight"),
    "head.norm.bias": TensorRow(theirs="transformer.ln_f.bias"),
    "head.table": TensorRow(theirs="lm_head.weight"),
}
FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    read=_read,
    write=_write,
    config=GPTConfig,
    tensors=TensorTable(ends=_ENDS, block=_BLOCK, prefix="transformer.h.{b}."),
    kinds={
        "n_embd": WIDTH,
        "n_layer": BLOCKS,
        "n_head": HEADS,
        "n_positions": POSITIONS,
    },
    without_effect=(
        *("n_ctx", "reorder_and_upcast_attn", "gradient_checkpointing"),
        *("summary_type", "summary_use_proj", "summary_activation"),  # of other heads
        *("summary_first_dropout", "summary_proj_to_labels"),
    ),
    is_constant=_is_mask,
    examples={
        "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32},
    },
)
