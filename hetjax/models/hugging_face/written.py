# SPDX-License-Identifier: Apache-2.0
"""Our models as folders that transformers loads: `config.json` and safetensors.

Owns which family tells a model of ours, in the words of transformers 4 and 5, and which
file has which layers. Does not own where values come from nor how a file is written
(`tensor_file.py`).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from hetjax.models.configs import DecoderConfig, GPTConfig, LlamaConfig, RopeScaling
from hetjax.models.decoders import model_of
from hetjax.models.hugging_face.configs import CONFIG
from hetjax.models.hugging_face.stored_tensors import INDEX, WHOLE
from hetjax.models.hugging_face.tensor_file import write_tensors
from hetjax.models.hugging_face.tensor_names import TensorPart, tensor_parts
from hetjax.models.model import abstract_params

FILE_BYTES = 4 * 2**30  # of a file, unless one layer is larger
DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}

Read = Callable[[str, tuple[int, ...]], np.ndarray]  # by full path and shape
Named = dict[str, np.ndarray]


def write_model(
    folder: Path,
    config: DecoderConfig,
    fields: Mapping[str, Any],
    read: Read,
    dtype: str,
    written: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Write a model's sizes and weights into a folder that is there.

    `fields` are those of its `config.json`, `dtype` is that of the weights; `written`
    is told of every file and of how many there are.
    """
    files = _files(config, fields["model_type"], DTYPES[dtype].itemsize)
    where: dict[str, str] = {}
    total_bytes = 0
    for number, parts in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        name = WHOLE if len(files) == 1 else name
        shapes = {part.name: part.shape for each in parts.values() for part in each}
        values = _tensors(config, parts, read)
        total_bytes += write_tensors(folder / name, shapes, DTYPES[dtype], values)
        where |= dict.fromkeys(shapes, name)
        written(number, len(files))
    if len(files) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    said = {**fields, "dtype": dtype, "torch_dtype": dtype}
    (folder / CONFIG).write_text(json.dumps(said, indent=2) + "\n")


def fields_of(config: DecoderConfig) -> dict[str, Any]:
    """Return a `config.json` for a model that never had one."""
    if isinstance(config, GPTConfig):
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": config.vocab_size,
            "n_embd": config.hidden_size,
            "n_layer": config.num_blocks,
            "n_head": config.num_heads,
            "n_positions": config.max_seq_len,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "tie_word_embeddings": config.tied,
        }
    assert isinstance(config, LlamaConfig), config
    kind, own = _family(config)
    if config.head_size or config.qk_norm:
        own = own | {"head_dim": config.size_of_heads}
    architecture = {
        "gemma3_text": "Gemma3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
    }.get(kind, f"{kind.capitalize()}ForCausalLM")
    return {
        "model_type": kind,
        "architectures": [architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.inner_size,
        "num_hidden_layers": config.num_blocks,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm.eps,
        "tie_word_embeddings": config.tied,
        **own,
    }


def _family(config: LlamaConfig) -> tuple[str, dict[str, Any]]:
    """The family that has all that the model has, and the fields that are its own."""
    rope = _rope(config.rope_theta, config.rope_scaling)
    silu: dict[str, Any] = {"hidden_act": "silu", **rope}
    kinds = [
        "sliding_attention" if config.has_window(block) else "full_attention"
        for block in range(config.num_blocks)
    ]
    windows = {
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "layer_types": kinds,
    }
    if config.norms == "around":
        assert config.query_scale is not None
        return "gemma3_text", _gemma3(config, kinds, rope)
    if config.routing is not None:
        experts = {
            "num_local_experts": config.routing.num_experts,
            "num_experts_per_tok": config.routing.top_k,
            "router_aux_loss_coef": config.routing.balance_coefficient,
        }
        if not config.qk_norm:
            return "mixtral", silu | experts | {"sliding_window": config.window}
        own = {
            "num_experts": config.routing.num_experts,
            "moe_intermediate_size": config.inner_size,
            "norm_topk_prob": config.routing.normalized,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
        }
        return "qwen3_moe", silu | windows | experts | own
    if config.qk_norm:
        return "qwen3", silu | windows
    if config.biases == "qkv":
        return "qwen2", silu | windows
    if config.window is not None:
        return "mistral", silu | {"sliding_window": config.window}
    return "llama", silu


def _gemma3(
    config: LlamaConfig, kinds: Sequence[str], rope: Mapping[str, Any]
) -> dict[str, Any]:
    theta = config.window_rope_theta or config.rope_theta
    assert config.query_scale is not None
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(config.query_scale**-2),
        "sliding_window": config.window,
        "layer_types": list(kinds),
        "rope_theta": config.rope_theta,
        "rope_local_base_freq": theta,
        "rope_scaling": rope["rope_scaling"],
        "rope_parameters": {
            "full_attention": rope["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
    }


def _rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    told: dict[str, Any] | None = None
    if scaling is not None:
        told = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind == "llama3":
        told = {
            **(told or {}),
            "low_freq_factor": scaling.low_turns,
            "high_freq_factor": scaling.high_turns,
            "original_max_position_embeddings": scaling.original_positions,
        }
    parameters = {"rope_theta": theta, **(told or {"rope_type": "default"})}
    return {
        "rope_theta": theta,
        "rope_scaling": told,
        "rope_parameters": parameters,
    }


def _files(
    config: DecoderConfig, model_type: str, item_bytes: int
) -> list[dict[str, list[TensorPart]]]:
    """Which parameters go into which file: whole layers, as many as fit."""
    found: list[dict[str, list[TensorPart]]] = []
    size_bytes = 0
    by_path = tensor_parts(config, model_type).items()
    for _, group in groupby(by_path, lambda each: each[0].partition(".")[0]):
        layer = dict(group)
        parts = [part for each in layer.values() for part in each]
        added_bytes = item_bytes * sum(int(np.prod(part.ours)) for part in parts)
        if not found or size_bytes + added_bytes > FILE_BYTES:
            found.append({})
            size_bytes = 0
        found[-1] |= layer
        size_bytes += added_bytes
    return found


def _tensors(
    config: DecoderConfig, parts: Mapping[str, list[TensorPart]], read: Read
) -> Iterator[tuple[str, np.ndarray]]:
    """Their tensors by name, views of some parameters of ours.

    One parameter is in memory at a time, where its tensors are let go of: the last of
    them is not held here while the next parameter is read.
    """
    shapes = {
        f"{spec.path}.{name}": parameter.shape
        for spec in model_of(config).modules
        for name, parameter in abstract_params(spec).items()
    }
    thirds: dict[str, dict[int, np.ndarray]] = {}
    for path, each in parts.items():
        value = read(path, shapes[path])
        for part in each:
            own = value if part.expert is None else value[part.expert]
            if part.row.third is None:
                yield part.name, part.write(own[: part.ours[0]])
                continue
            of = thirds.setdefault(part.name, {})
            of[part.row.third] = part.write(own[: part.ours[0]])
            if len(of) == 3:
                del thirds[part.name]
                yield part.name, np.concatenate([of.pop(0), of.pop(1), of.pop(2)], -1)
        del value, own
