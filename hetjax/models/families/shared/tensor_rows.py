# SPDX-License-Identifier: Apache-2.0
"""Defines tables that map each parameter of ours to a tensor of Hugging Face.

Owns the rows, with the layout of tensors, and the table of Llama, most of which its
relatives share. Their linear weights are (out, in); ours are (in, out), with heads as a
separate dim. GPT-2 has our layout, and one tensor for queries, keys and values. Each
expert is one tensor. Does not own shapes (`hugging_face/tensor_names.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRow:
    """The tensor of a parameter, named within its block or module; {e} is the expert.

    `inputs` counts our leading dims that are the inputs of a linear weight; None if the
    parameter is no linear weight. `third` selects one of three side by side in a
    tensor.
    """

    theirs: str
    inputs: int | None = None
    transposed: bool = True
    third: int | None = None


Rows = Mapping[str, TensorRow]  # by our name within a block, or full path


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorTable:
    """Rows of the embedding and the head by full path, and of a block by the path
    within it; tensor names of block {b} begin with `prefix`."""

    ends: Rows
    block: Rows
    prefix: str


def linear(name: str, inputs: int = 1) -> TensorRow:
    """Return the row of a linear weight as torch stores it."""
    return TensorRow(theirs=f"{name}.weight", inputs=inputs)


def within(module: str, rows: Rows) -> dict[str, TensorRow]:
    """Return the rows of one module of a block, by their names in the block."""
    return {f"{module}.{name}": row for name, row in rows.items()}


ATTENTION: Rows = {
    "attention.norm.scale": TensorRow(theirs="input_layernorm.weight"),
    "attention.q": linear("self_attn.q_proj"),
    "attention.k": linear("self_attn.k_proj"),
    "attention.v": linear("self_attn.v_proj"),
    "attention.out": linear("self_attn.o_proj", inputs=2),
    "attention.q_bias": TensorRow(theirs="self_attn.q_proj.bias"),
    "attention.k_bias": TensorRow(theirs="self_attn.k_proj.bias"),
    "attention.v_bias": TensorRow(theirs="self_attn.v_proj.bias"),
    "attention.out_bias": TensorRow(theirs="self_attn.o_proj.bias"),
    "attention.q_norm.scale": TensorRow(theirs="self_attn.q_norm.weight"),
    "attention.k_norm.scale": TensorRow(theirs="self_attn.k_norm.weight"),
}
NORM_BETWEEN: Rows = {"norm.scale": TensorRow(theirs="post_attention_layernorm.weight")}
GATED_MLP: Rows = {
    "gate": linear("mlp.gate_proj"),
    "up": linear("mlp.up_proj"),
    "down": linear("mlp.down_proj"),
    "gate_bias": TensorRow(theirs="mlp.gate_proj.bias"),
    "up_bias": TensorRow(theirs="mlp.up_proj.bias"),
    "down_bias": TensorRow(theirs="mlp.down_proj.bias"),
}
ENDS: Rows = {
    "embedding.table": TensorRow(theirs="model.embed_tokens.weight"),
    "head.norm.scale": TensorRow(theirs="model.norm.weight"),
    "head.table": TensorRow(theirs="lm_head.weight"),
}


def llama_table(block: Rows) -> TensorTable:
    """Return the table of a relative of Llama whose blocks have these rows."""
    return TensorTable(ends=ENDS, block=block, prefix="model.layers.{b}.")


DENSE = llama_table({**ATTENTION, **within("mlp", {**NORM_BETWEEN, **GATED_MLP})})
