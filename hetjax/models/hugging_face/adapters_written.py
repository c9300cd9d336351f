# SPDX-License-Identifier: Apache-2.0
"""Writes adapters as a folder that PEFT loads: `adapter_config.json` and safetensors.

PEFT's A is (rank, inputs) and its B (outputs, rank), whatever the layout of its base.
Where its base has one tensor for queries, keys and values (GPT-2), PEFT has one adapter
for them: its A stacks those of our three adapters, its B is block-diagonal. Does not
own where values come from.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from hetjax.models.configs import DecoderConfig
from hetjax.models.finetuning import LoraConfig
from hetjax.models.hugging_face.adapter_config import ADAPTER_CONFIG, ADAPTERS
from hetjax.models.hugging_face.tensor_names import TensorPart, tensor_parts
from hetjax.models.hugging_face.written import Named, Read
from hetjax.models.model import AbstractParam, Model, ModuleSpec, abstract_params

_Pair = tuple[np.ndarray, np.ndarray]  # A and B as matrices in our layout


def write_adapters(
    folder: Path,
    config: DecoderConfig,
    model_type: str,
    model: Model,
    lora: LoraConfig,
    read: Read,
    dtype: np.dtype,
    base: str | None,
) -> None:
    """Write the adapters of a model into an existing folder.

    `config` is that of the whole model, `base` the name of its weights.
    """
    parts = tensor_parts(config, model_type)
    pairs = _pairs(model, parts, read)
    named: Named = {}
    ranks: dict[str, int] = {}
    for module, (a, b) in pairs.items():
        begins = f"base_model.model.{module}"
        named[f"{begins}.lora_A.weight"] = np.ascontiguousarray(a.T.astype(dtype))
        named[f"{begins}.lora_B.weight"] = np.ascontiguousarray(b.T.astype(dtype))
        if a.shape[1] != lora.rank:
            ranks[module] = a.shape[1]
    save_file(named, folder / ADAPTERS, metadata={"format": "pt"})
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "rank_pattern": ranks,
        "alpha_pattern": {
            module: lora.alpha * rank / lora.rank for module, rank in ranks.items()
        },
        "target_modules": sorted(pairs),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": _are_as_ours(parts),
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(said, indent=2) + "\n")


def _are_as_ours(parts: Mapping[str, list[TensorPart]]) -> bool:
    """Whether linear weights of the base are (inputs, outputs), as ours are."""
    rows = (part.row for each in parts.values() for part in each)
    return any(row.inputs is not None and not row.transposed for row in rows)


def _pairs(
    model: Model, parts: Mapping[str, list[TensorPart]], read: Read
) -> dict[str, _Pair]:
    """Return the adapter of each module of the base that has one."""
    found: dict[str, dict[int, _Pair]] = {}
    for spec in model.modules:
        for name, parameter in abstract_params(spec.unquantised).items():
            if not parameter.can_have_adapter:
                continue
            part, *others = parts[f"{spec.path}.{name}"]
            assert not others, f"experts have no adapters: {spec.path}"
            thirds = found.setdefault(part.name.removesuffix(".weight"), {})
            thirds[part.row.third or 0] = _pair(spec, name, parameter, read)
    as_one = {module: _as_one(thirds) for module, thirds in found.items()}
    return {module: pair for module, pair in as_one.items() if pair[0].size}


def _pair(spec: ModuleSpec, weight: str, parameter: AbstractParam, read: Read) -> _Pair:
    """Return a weight's adapter as matrices, of rank 0 if it has none."""
    names = next((a.names for a in spec.adapters if a.weight == weight), None)
    if names is None:
        inputs = math.prod(parameter.shape[: parameter.num_inputs])
        outputs = math.prod(parameter.shape) // inputs
        return np.zeros((inputs, 0), np.float32), np.zeros((0, outputs), np.float32)
    abstract = abstract_params(spec)
    a, b = (read(f"{spec.path}.{name}", abstract[name].shape) for name in names)
    return a.reshape(-1, a.shape[-1]), b.reshape(b.shape[0], -1)


def _as_one(thirds: Mapping[int, _Pair]) -> _Pair:
    """Return the adapter of a module whose outputs are those of its thirds in order."""
    pairs = [thirds[third] for third in sorted(thirds)]
    b = np.zeros(np.sum([b.shape for _, b in pairs], axis=0), np.float32)
    row = column = 0
    for _, own in pairs:
        height, width = own.shape
        b[row : row + height, column : column + width] = own
        row, column = row + height, column + width
    return np.concatenate([a for a, _ in pairs], axis=1), b
