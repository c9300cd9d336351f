# SPDX-License-Identifier: Apache-2.0
"""Where each parameter of ours is in a checkpoint of Hugging Face, and in which shape.

Owns one table a family: our name within a block, theirs, and how the numbers lie. Their
linear weights are (out, in), ours are the other way round with heads apart; those of
GPT-2 lie as ours do, and its queries, keys and values are one. Experts are a tensor
each. Rows that pad our vocabulary are not theirs. Does not own files (`tensors.py`).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetjax.models.configs import DecoderConfig, GPTConfig, LlamaConfig
from hetjax.models.decoders import model_of
from hetjax.models.model import abstract_params

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRow:
    """A parameter within its block or module; {b} is the block, {e} the expert.

    `inputs` counts our leading dims that are the inputs of a linear weight, None if it
    is none. `third` of a tensor that holds three side by side.
    """

    theirs: str
    inputs: int | None = None
    transposed: bool = True
    third: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPart:
    """Where our parameter, or one expert of it, is: a tensor, or a third of it.

    `shape` is theirs, `ours` that of the part of our parameter.
    """

    name: str
    shape: Shape
    ours: Shape
    row: TensorRow
    expert: int | None = None

    def read(self, value: np.ndarray) -> np.ndarray:
        """Give our part of their value, or of the third of it; a view."""
        if self.row.inputs is not None and self.row.transposed:
            value = value.T
        return value.reshape(self.ours)

    def write(self, value: np.ndarray) -> np.ndarray:
        """Give their value of our part; of three side by side one third."""
        if self.row.inputs is None:
            third = self.row.third is not None
            return value.reshape(-1) if third else value.reshape(self.shape)
        matrix = value.reshape(math.prod(self.ours[: self.row.inputs]), -1)
        return matrix.T if self.row.transposed else matrix


_ATTENTION = {
    "attention.norm.scale": TensorRow(theirs="input_layernorm.weight"),
    "attention.q": TensorRow(theirs="self_attn.q_proj.weight", inputs=1),
    "attention.k": TensorRow(theirs="self_attn.k_proj.weight", inputs=1),
    "attention.v": TensorRow(theirs="self_attn.v_proj.weight", inputs=1),
    "attention.out": TensorRow(theirs="self_attn.o_proj.weight", inputs=2),
    "attention.q_bias": TensorRow(theirs="self_attn.q_proj.bias"),
    "attention.k_bias": TensorRow(theirs="self_attn.k_proj.bias"),
    "attention.v_bias": TensorRow(theirs="self_attn.v_proj.bias"),
    "attention.q_norm.scale": TensorRow(theirs="self_attn.q_norm.weight"),
    "attention.k_norm.scale": TensorRow(theirs="self_attn.k_norm.weight"),
}
_NORM_BETWEEN = {"norm.scale": TensorRow(theirs="post_attention_layernorm.weight")}
_NORMS_AROUND = {
    "post_norm.scale": TensorRow(theirs="post_feedforward_layernorm.weight"),
    "norm.scale": TensorRow(theirs="pre_feedforward_layernorm.weight"),
}
_MLP = {
    "gate": TensorRow(theirs="mlp.gate_proj.weight", inputs=1),
    "up": TensorRow(theirs="mlp.up_proj.weight", inputs=1),
    "down": TensorRow(theirs="mlp.down_proj.weight", inputs=1),
}
_QWEN_EXPERTS = {
    "router": TensorRow(theirs="mlp.gate.weight", inputs=1),
    "gate": TensorRow(theirs="mlp.experts.{e}.gate_proj.weight", inputs=1),
    "up": TensorRow(theirs="mlp.experts.{e}.up_proj.weight", inputs=1),
    "down": TensorRow(theirs="mlp.experts.{e}.down_proj.weight", inputs=1),
}
_MIXTRAL_EXPERTS = {
    "router": TensorRow(theirs="block_sparse_moe.gate.weight", inputs=1),
    "gate": TensorRow(theirs="block_sparse_moe.experts.{e}.w1.weight", inputs=1),
    "up": TensorRow(theirs="block_sparse_moe.experts.{e}.w3.weight", inputs=1),
    "down": TensorRow(theirs="block_sparse_moe.experts.{e}.w2.weight", inputs=1),
}
_ENDS = {
    "embedding.table": TensorRow(theirs="model.embed_tokens.weight"),
    "head.norm.scale": TensorRow(theirs="model.norm.weight"),
    "head.table": TensorRow(theirs="lm_head.weight"),
}


def _conv(name: str, inputs: int = 1, third: int | None = None) -> TensorRow:
    return TensorRow(theirs=name, inputs=inputs, transposed=False, third=third)


_GPT2 = {
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
_GPT2_ENDS = {
    "embedding.table": TensorRow(theirs="transformer.wte.weight"),
    "embedding.positions": TensorRow(theirs="transformer.wpe.weight"),
    "head.norm.scale": TensorRow(theirs="transformer.ln_f.weight"),
    "head.norm.bias": TensorRow(theirs="transformer.ln_f.bias"),
    "head.table": TensorRow(theirs="lm_head.weight"),
}


def tensor_parts(config: DecoderConfig, model_type: str) -> dict[str, list[TensorPart]]:
    """Return where each parameter of the model is, by its full path.

    Experts of one parameter are several parts, in order.
    """
    ends, of_block, prefix = _table(config, model_type)
    found: dict[str, list[TensorPart]] = {}
    for spec in model_of(config).modules:
        block, _, module = spec.path.partition(".")
        for name, parameter in abstract_params(spec).items():
            path, shape = f"{spec.path}.{name}", parameter.shape
            if path in ends:
                found[path] = [_part(ends[path], ends[path].theirs, config, shape)]
                continue
            row = of_block[f"{module}.{name}"]
            theirs = prefix.format(b=int(block.removeprefix("block_"))) + row.theirs
            found[path] = list(_of_block(row, theirs, config, shape))
    return found


def _table(
    config: DecoderConfig, model_type: str
) -> tuple[Mapping[str, TensorRow], Mapping[str, TensorRow], str]:
    """The rows of the two ends, those of a block, and how names in it begin."""
    if isinstance(config, GPTConfig):
        return _GPT2_ENDS, _GPT2, "transformer.h.{b}."
    assert isinstance(config, LlamaConfig), config
    after = _NORM_BETWEEN if config.norms == "before" else _NORMS_AROUND
    module, inside = "mlp", _MLP
    if config.routing is not None:
        module = "moe"
        inside = _MIXTRAL_EXPERTS if model_type == "mixtral" else _QWEN_EXPERTS
    rows = {f"{module}.{name}": row for name, row in (after | inside).items()}
    if config.norms == "around":
        of_attention = TensorRow(theirs="post_attention_layernorm.weight")
        rows["attention.post_norm.scale"] = of_attention
    return _ENDS, _ATTENTION | rows, "model.layers.{b}."


def _of_block(
    row: TensorRow, theirs: str, config: DecoderConfig, shape: Shape
) -> Iterator[TensorPart]:
    if "{e}" not in row.theirs:
        yield _part(row, theirs, config, shape)
        return
    for expert in range(shape[0]):
        name = theirs.replace("{e}", str(expert))
        yield _part(row, name, config, shape[1:], expert=expert)


def _part(
    row: TensorRow, name: str, config: DecoderConfig, shape: Shape, **own: Any
) -> TensorPart:
    if name.endswith(("embed_tokens.weight", "lm_head.weight", "wte.weight")):
        shape = config.vocab_size, shape[1]
    theirs = shape
    if row.inputs is not None:
        ends = math.prod(shape[: row.inputs]), math.prod(shape[row.inputs :])
        theirs = ends[::-1] if row.transposed else ends
    elif row.third is not None:
        theirs = (math.prod(shape),)
    elif len(shape) == 2 and name.endswith(".bias"):
        theirs = (math.prod(shape),)
    if row.third is not None:
        theirs = *theirs[:-1], 3 * theirs[-1]
    return TensorPart(name=name, shape=theirs, ours=shape, row=row, **own)
