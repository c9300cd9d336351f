# SPDX-License-Identifier: Apache-2.0
"""The `config.json` of Hugging Face models: read as our configs.

Owns which families are known, and what their fields mean, in the words of transformers
4 (`rope_theta`, `rope_scaling`, `sliding_window_pattern`) and 5 (`rope_parameters`,
`layer_types`). What would change a model's numbers and is not ours is refused, by its
name. Does not own weights (`tensor_names.py`).
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hetjax.errors import BadInput
from hetjax.models.configs import (
    DecoderConfig,
    GPTConfig,
    LlamaConfig,
    NormConfig,
    RopeScaling,
    Routing,
)

CONFIG = "config.json"
WHOLE = "model.safetensors"  # all weights in one file, or in those of an index
INDEX = "model.safetensors.index.json"
_WINDOW = "sliding_attention"

Fields = Mapping[str, Any]


def read_config(path: Path) -> tuple[DecoderConfig, dict[str, Any]]:
    """Read a `config.json`, or that of a folder: the model's sizes, and all fields.

    A TOML file with the same fields is as good. BadInput if there is none, for a
    family that is not known, and for fields that ask for what our models do not do.
    """
    file = path / CONFIG if path.is_dir() else path
    try:
        text = file.read_text()
        raw = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise BadInput(
            got=f"model {str(path)!r}: {getattr(error, 'strerror', None) or error}",
            allowed=f"a folder with a {CONFIG} of Hugging Face, that file, or a TOML "
            "with its fields",
            fix="give its path; hetjax train --help says what else names a model",
        ) from None
    name = (file.parent if file.name == CONFIG else file).resolve().stem
    return config_of(raw, name), raw


def config_of(raw: Fields, name: str) -> DecoderConfig:
    """Return the sizes of a model by the fields of its `config.json`."""
    kind = str(raw.get("model_type")) if isinstance(raw, Mapping) else "none"
    if kind == "gemma3":  # with eyes: what reads is a part of it
        return config_of(raw["text_config"], name)
    if kind not in _FAMILIES:
        raise BadInput(
            got=f"model {name!r}: model_type {kind!r}",
            allowed=", ".join(sorted(_FAMILIES)),
            fix="give a model of one of these families",
        )
    fields = _Fields(raw, name)
    try:
        return _FAMILIES[kind](fields)
    except KeyError as missing:
        raise BadInput(
            got=f"model {name!r}: no field {missing} in {CONFIG}",
            allowed=f"a whole {CONFIG} of a {kind}",
            fix="fetch the file again",
        ) from None


class _Fields:
    """Fields by name; null is as good as none."""

    def __init__(self, raw: Fields, name: str) -> None:
        self.raw, self.name = raw, name

    def __getitem__(self, key: str) -> Any:
        if self.raw.get(key) is None:
            raise KeyError(key)
        return self.raw[key]

    def get(self, key: str, default: Any = None) -> Any:
        value = self.raw.get(key)
        return default if value is None else value

    def require(self, key: str, *allowed: Any) -> None:
        """Refuse a value that our models do not have."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            raise BadInput(
                got=f"model {self.name!r}: {key} = {value!r}",
                allowed=" or ".join(map(repr, allowed)),
                fix="give a model without it",
            )


def _gpt2(fields: _Fields) -> GPTConfig:
    fields.require("activation_function", "gelu_new", "gelu_pytorch_tanh")
    fields.require("scale_attn_weights", True)
    fields.require("scale_attn_by_inverse_layer_idx", False)
    fields.require("add_cross_attention", False)
    fields.require("layer_norm_epsilon", 1e-5)
    fields.require("tie_word_embeddings", True)
    hidden_size = fields["n_embd"]
    fields.require("n_inner", 4 * hidden_size)
    return GPTConfig(
        name=fields.name,
        vocab_size=fields["vocab_size"],
        hidden_size=hidden_size,
        num_blocks=fields["n_layer"],
        num_heads=fields["n_head"],
        max_seq_len=fields["n_positions"],
    )


def _llama(fields: _Fields, **own: Any) -> LlamaConfig:
    """What all relatives of Llama have, and what one of them has of its `own`."""
    fields.require("attention_bias", False)
    fields.require("mlp_bias", False)
    num_heads = fields["num_attention_heads"]
    theta, scaling = _rope(fields, _rope_fields(fields), fields.get("rope_theta"))
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
        rope_theta=theta,
        rope_scaling=scaling,
        norm=NormConfig(kind="rms", eps=fields.get("rms_norm_eps", 1e-6)),
        tied=fields.get("tie_word_embeddings", False),
    )
    if "activation" not in own:
        fields.require("hidden_act", "silu")
    return LlamaConfig(**common | own)


def _mistral(fields: _Fields) -> LlamaConfig:
    return _llama(fields, window=fields.get("sliding_window"))


def _mixtral(fields: _Fields) -> LlamaConfig:
    routing = Routing(
        num_experts=fields["num_local_experts"],
        top_k=fields["num_experts_per_tok"],
        capacity_factor=None,
        balance_coefficient=fields.get("router_aux_loss_coef", 0.0),
    )
    return _llama(fields, window=fields.get("sliding_window"), routing=routing)


def _qwen2(fields: _Fields) -> LlamaConfig:
    return _llama(fields, biases="qkv", **_windows(fields))


def _qwen3(fields: _Fields) -> LlamaConfig:
    return _llama(fields, qk_norm=True, **_windows(fields))


def _qwen3_moe(fields: _Fields) -> LlamaConfig:
    fields.require("decoder_sparse_step", 1)
    fields.require("mlp_only_layers", [])
    num_experts = fields.get("num_experts") or fields["num_local_experts"]
    routing = Routing(
        num_experts=num_experts,
        top_k=fields["num_experts_per_tok"],
        capacity_factor=None,
        balance_coefficient=fields.get("router_aux_loss_coef", 0.0),
        normalized=fields.get("norm_topk_prob", False),
    )
    return _llama(
        fields,
        qk_norm=True,
        inner_size=fields["moe_intermediate_size"],
        routing=routing,
        **_windows(fields),
    )


def _gemma3(fields: _Fields) -> LlamaConfig:
    fields.require("hidden_activation", "gelu_pytorch_tanh")
    for capped in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.get(capped) is not None:
            fields.require(capped, None)
    fields.require("use_bidirectional_attention", False)
    parameters = _rope_fields(fields)
    whole, windowed = (parameters.get(kind, {}) for kind in ("full_attention", _WINDOW))
    if not whole:  # the words of transformers 4
        whole = parameters
        windowed = {"rope_theta": fields.get("rope_local_base_freq", 10_000.0)}
    theta, scaling = _rope(fields, whole, fields.get("rope_theta", 1_000_000.0))
    pattern = fields.get("sliding_window_pattern") or fields.get(
        "_sliding_window_pattern", 6
    )
    kinds = fields.get("layer_types")
    return _llama(
        fields,
        num_heads=fields.get("num_attention_heads", 8),
        num_kv_heads=fields.get("num_key_value_heads", 4),
        head_size=fields.get("head_dim", 256),
        query_scale=fields.get("query_pre_attn_scalar", 256) ** -0.5,
        window=fields.get("sliding_window", 4096),
        windowed=_windowed(kinds) if kinds else (*(True,) * (pattern - 1), False),
        rope_theta=theta,
        rope_scaling=scaling,
        window_rope_theta=windowed["rope_theta"],
        qk_norm=True,
        activation="gelu",
        norm=NormConfig(
            kind="rms", eps=fields.get("rms_norm_eps", 1e-6), around_one=True
        ),
        norms="around",
        scaled_embedding=True,
        tied=fields.get("tie_word_embeddings", True),
    )


_FAMILIES: Mapping[str, Callable[[_Fields], DecoderConfig]] = {
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}


def _windows(fields: _Fields) -> dict[str, Any]:
    """Qwen's window, of the blocks from `max_window_layers` on if it is used at all."""
    if not fields.get("use_sliding_window", False):
        return {}
    kinds, num_blocks = fields.get("layer_types"), fields["num_hidden_layers"]
    first = fields.get("max_window_layers", 28)
    return {
        "window": fields["sliding_window"],
        "windowed": _windowed(kinds)
        if kinds
        else tuple(block >= first for block in range(num_blocks)),
    }


def _windowed(kinds: list[str]) -> tuple[bool, ...]:
    return tuple(kind == _WINDOW for kind in kinds)


def _rope_fields(fields: _Fields) -> Fields:
    return fields.get("rope_parameters") or fields.get("rope_scaling") or {}


def _rope(
    fields: _Fields, told: Fields, theta: float | None
) -> tuple[float, RopeScaling | None]:
    """The base of the rotation, and its scaling; Gemma's by kind are taken apart."""
    base: float = told.get("rope_theta") or theta or 10_000.0
    kind = told.get("rope_type") or told.get("type") or "default"
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, RopeScaling(kind="linear", factor=told["factor"])
    if kind == "llama3":
        return base, RopeScaling(
            kind="llama3",
            factor=told["factor"],
            low_turns=told["low_freq_factor"],
            high_turns=told["high_freq_factor"],
            original_positions=told["original_max_position_embeddings"],
        )
    raise BadInput(
        got=f"model {fields.name!r}: rope_type {kind!r}",
        allowed="default, linear, llama3",
        fix="give a model with one of these, or remove the scaling from its "
        f"{CONFIG} if your sequences are not longer than its first training's",
    )
