# SPDX-License-Identifier: Apache-2.0
"""The `config.json` of Hugging Face models: read as our configs.

Owns which families are known, and what their fields mean, in the words of transformers
4 (`rope_theta`, `rope_scaling`, `sliding_window_pattern`) and 5 (`rope_parameters`,
`layer_types`). What would change a model's numbers and is not ours is refused, by its
name. Does not own weights (`tensor_names.py`).
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from hetjax.errors import BadInput
from hetjax.files.parsing import json_value, toml_table
from hetjax.files.reading import Unreadable, decoded, read_bytes
from hetjax.models.configs import (
    DecoderConfig,
    GPTConfig,
    LlamaConfig,
    NormConfig,
    RopeScaling,
    Routing,
)
from hetjax.models.hugging_face.adapter_config import has_adapters, read_adapter_config
from hetjax.models.hugging_face.fields import FULL, WINDOW, Fields
from hetjax.models.hugging_face.own_head import has_own_head
from hetjax.models.hugging_face.quantised_folders import SETTINGS, check_settings
from hetjax.models.hugging_face.stored_tensors import has_weights

CONFIG = "config.json"
# with eyes: what reads is a part of it
_WITH_EYES = {"gemma3": "Gemma3ForCausalLM"}
_OF_THE_WHOLE = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")


def read_config(path: Path) -> tuple[DecoderConfig, dict[str, Any]]:
    """Read a `config.json`, or that of a folder: the model's sizes, and all fields.

    A TOML file with the same fields is as good. A folder's head that differs from its
    embedding is not tied, whatever the fields say. BadInput if there is none, for a
    family that is not known, for fields that ask for what our models do not do, and
    for a folder whose weights are quantised.
    """
    if has_adapters(path):
        adapters = read_adapter_config(path)
        raise BadInput(
            got=f"model {str(path)!r}, which is adapters of PEFT for {adapters.base}",
            allowed="the folder of a model; adapters are weights to begin with",
            fix=f"hetjax train {adapters.base} --init {path}",
        )
    file = path / CONFIG if path.is_dir() else path
    parse = toml_table if file.suffix == ".toml" else json_value
    try:
        raw = parse(decoded(read_bytes(file, what="model"), f"model {str(path)!r}"))
    except Unreadable:
        raise
    except (OSError, ValueError) as error:
        raise BadInput(
            got=f"model {str(path)!r}: {getattr(error, 'strerror', None) or error}",
            allowed=f"a folder with a {CONFIG} of Hugging Face, that file, or a TOML "
            "with its fields",
            fix="give its path; hetjax train --help says what else names a model",
        ) from None
    is_folders = file.name == CONFIG
    name = file.parent.resolve().name if is_folders else file.resolve().stem
    settings = raw
    raw = _of_text(raw, name)
    config = config_of(raw, name)
    if not path.is_dir() or not has_weights(path):
        return config, _of_whole_weights(name, raw)
    check_settings(path, settings)
    return _as_stored(path, config, raw)


def _of_whole_weights(name: str, raw: dict[str, Any]) -> dict[str, Any]:
    """The fields without those of how weights are quantised that are not there."""
    if raw.get(SETTINGS):
        _warn_once(f"model {name!r}: {SETTINGS} is left out, its sizes alone are used")
    return {key: value for key, value in raw.items() if key != SETTINGS}


def _as_stored(
    folder: Path, config: DecoderConfig, raw: dict[str, Any]
) -> tuple[DecoderConfig, dict[str, Any]]:
    """Sizes and fields, not tied where the folder stores a head of its own."""
    try:
        if not config.tied or not has_own_head(folder):
            return config, raw
    except BadInput as error:  # whatever uses the weights refuses them
        _warn_once(f"{error.got}: its head is tied by its {CONFIG}")
        return config, raw
    _warn_once(
        f"{folder}: lm_head.weight differs from the embedding, so it is not tied, "
        f"although {CONFIG} says so; tie_word_embeddings = false there says the same"
    )
    return replace(config, tied=False), {**raw, "tie_word_embeddings": False}


@lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    """Warn; a command reads the same folder several times."""
    warnings.warn(text, stacklevel=3)


def _of_text(raw: Any, name: str) -> Any:
    """The fields of what reads: all of them, or a part with what the whole has too."""
    if not isinstance(raw, Mapping) or str(raw.get("model_type")) not in _WITH_EYES:
        return raw
    of_whole = {key: raw[key] for key in _OF_THE_WHOLE if key in raw}
    text = Fields(raw, name).get("text_config", {})
    return {**of_whole, **text, "architectures": [_WITH_EYES[raw["model_type"]]]}


def config_of(raw: Any, name: str) -> DecoderConfig:
    """Return the sizes of a model by the fields of its `config.json`."""
    kind = str(raw.get("model_type")) if isinstance(raw, Mapping) else "none"
    if kind not in _FAMILIES:
        raise BadInput(
            got=f"model {name!r}: model_type {kind!r}",
            allowed=", ".join(sorted([*_FAMILIES, *_WITH_EYES])),
            fix="give a model of one of these families",
        )
    fields = Fields({**_LEFT_OUT.get(kind, {}), **raw}, name)
    try:
        return _FAMILIES[kind](fields)
    except KeyError as missing:
        raise BadInput(
            got=f"model {name!r}: no field {missing} in {CONFIG}",
            allowed=f"a whole {CONFIG} of a {kind}",
            fix="fetch the file again",
        ) from None


def _gpt2(fields: Fields) -> GPTConfig:
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


def _llama(fields: Fields, **own: Any) -> LlamaConfig:
    """What all relatives of Llama have, and what one of them has of its `own`.

    Those that have biases, or none, whatever their fields say do not read the fields.
    """
    if fields["model_type"] in _ASKED_FOR_BIASES:
        fields.require("attention_bias", False)
        fields.require("mlp_bias", False)
    num_heads = fields["num_attention_heads"]
    theta, scaling = _rope(_rope_fields(fields), fields.get("rope_theta"))
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


def _mistral(fields: Fields) -> LlamaConfig:
    return _llama(fields, window=fields.get("sliding_window"))


def _mixtral(fields: Fields) -> LlamaConfig:
    routing = Routing(
        num_experts=fields["num_local_experts"],
        top_k=fields["num_experts_per_tok"],
        capacity_factor=None,
        balance_coefficient=fields.get("router_aux_loss_coef", 0.0),
    )
    return _llama(fields, window=fields.get("sliding_window"), routing=routing)


def _qwen2(fields: Fields) -> LlamaConfig:
    return _llama(fields, biases="qkv", **_windows(fields))


def _qwen3(fields: Fields) -> LlamaConfig:
    return _llama(fields, qk_norm=True, **_windows(fields))


def _qwen3_moe(fields: Fields) -> LlamaConfig:
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


def _gemma3(fields: Fields) -> LlamaConfig:
    fields.require("hidden_activation", "gelu_pytorch_tanh")
    fields.require("attn_logit_softcapping", None)
    fields.require("final_logit_softcapping", None)
    fields.require("use_bidirectional_attention", False)
    parameters = _rope_fields(fields)
    window_theta = fields["rope_local_base_freq"]
    if FULL in parameters:  # else the words of transformers 4
        window_theta = parameters.part(WINDOW)["rope_theta"]
        parameters = parameters.part(FULL)
    theta, scaling = _rope(parameters, fields["rope_theta"])
    pattern = fields.get("sliding_window_pattern") or fields.get(
        "_sliding_window_pattern", 6
    )
    return _llama(
        fields,
        query_scale=fields["query_pre_attn_scalar"] ** -0.5,
        window=fields["sliding_window"],
        windowed=_windowed(fields) or (*(True,) * (pattern - 1), False),
        rope_theta=theta,
        rope_scaling=scaling,
        window_rope_theta=window_theta,
        qk_norm=True,
        activation="gelu",
        norm=NormConfig(
            kind="rms", eps=fields.get("rms_norm_eps", 1e-6), around_one=True
        ),
        norms="around",
        scaled_embedding=True,
    )


_ASKED_FOR_BIASES = ("gemma3_text", "llama", "qwen3", "qwen3_moe")
# what transformers takes for fields that are left out, where it is not what we do; null
# is no field that is left out
_LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
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
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4_096},
    "mixtral": {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    },
    "qwen3": {"head_dim": 128},
}
_FAMILIES: Mapping[str, Callable[[Fields], DecoderConfig]] = {
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}


def _windows(fields: Fields) -> dict[str, Any]:
    """Qwen's window, of the blocks from `max_window_layers` on if it is used at all."""
    if not fields.get("use_sliding_window", False):
        return {}
    num_blocks, first = fields["num_hidden_layers"], fields.get("max_window_layers", 28)
    by_number = tuple(block >= first for block in range(num_blocks))
    return {
        "window": fields["sliding_window"],
        "windowed": _windowed(fields) or by_number,
    }


def _windowed(fields: Fields) -> tuple[bool, ...]:
    """Which blocks have a window, where each is told; else nothing."""
    kinds = fields.get("layer_types", ())
    if kinds and len(kinds) != fields["num_hidden_layers"]:
        fields.refuse("layer_types", "one kind for each of num_hidden_layers")
    return tuple(kind == WINDOW for kind in kinds)


def _rope_fields(fields: Fields) -> Fields:
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    return fields.part(name)


def _rope(told: Fields, theta: float | None) -> tuple[float, RopeScaling | None]:
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
        got=f"model {told.name!r}: rope_type {kind!r}",
        allowed="default, linear, llama3",
        fix="give a model with one of these, or remove the scaling from its "
        f"{CONFIG} if your sequences are not longer than its first training's",
    )
