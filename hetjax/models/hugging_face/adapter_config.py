# SPDX-License-Identifier: Apache-2.0
"""Reads PEFT's `adapter_config.json`: which adapters it describes, over which base.

Owns which of its fields change the output of stored adapters: those that our LoRA
supports are read, all others are refused by name. Does not own tensors
(`adapters_read.py`). Imports no JAX.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetjax.errors import BadInput, placed
from hetjax.files.parsing import read_json
from hetjax.models.hugging_face.hub import local_folder
from hetjax.models.hugging_face.stored_tensors import has_weights

ADAPTERS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_BASE = "base_model_name_or_path"
_PATTERNS = ("rank_pattern", "alpha_pattern")
# how adapters were made, or where they are: the tensors say where they are
_WITHOUT_EFFECT = {
    *("auto_mapping", "peft_version", "inference_mode", "target_modules"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout"),
    *("fan_in_fan_out", "megatron_config", "megatron_core", "loftq_config"),
    *("eva_config", "qalora_group_size", "ensure_weight_tying", "runtime_config"),
}
_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    "revision": ("main", None),
    # all other initial values change the weights of the base, too
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """Ranks and scales of a folder's adapters, and the name of their base."""

    folder: Path
    base: str
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    by_root: bool  # scales are alpha / sqrt(rank), not alpha / rank

    def rank_of(self, module: str) -> int:
        return _matched(self.rank_pattern, module, self.rank)

    def scale(self, module: str) -> float:
        """Return the factor of the product of a module's B and A."""
        rank = self.rank_of(module)
        alpha = _matched(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)


def has_adapters(folder: Path) -> bool:
    """Whether the folder holds adapters of PEFT."""
    return (folder / ADAPTER_CONFIG).is_file()


def base_folder(folder: Path) -> Path:
    """Return the folder with the sizes and the tokenizer of these weights.

    For adapters that is their base, which may have to be fetched; for a model it is the
    folder itself. Raises BadInput for a missing base, and for adapters in the folder of
    a model.
    """
    if not has_adapters(folder):
        return folder
    config = read_adapter_config(folder)
    with placed(f"the base of the adapters in {str(folder)!r}"):
        base = local_folder(config.base)
    if has_adapters(base):
        raise _bad(
            folder,
            f"whose base {config.base!r} holds adapters, too",
            "a model as the base",
        )
    return base


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read the config of a folder's adapters; BadInput names what we do not support."""
    if has_weights(folder):
        raise BadInput(
            got=f"{str(folder)!r} with the weights of a model and adapters of PEFT",
            allowed="one of the two in a folder",
            fix=f"move {ADAPTER_CONFIG} and {ADAPTERS} to a folder of their own",
        )
    file = folder / ADAPTER_CONFIG
    raw = read_json(file, what="adapters' config", fix="fetch the folder again")
    if not isinstance(raw, Mapping):
        raise _bad(folder, "whose config is not an object", "an object with fields")
    for name, value in raw.items():
        _check_field(folder, name, value)
    if not isinstance(raw.get(_BASE), str) or not raw[_BASE]:
        raise BadInput(
            got=f"{_BASE} = {raw.get(_BASE)!r} in {str(file)!r}",
            allowed="the folder of the model that the adapters belong to, or its name "
            "on the hub",
            fix="write it there; hetjax export RUN --to ADAPTERS --base FOLDER does",
        )
    return AdapterConfig(
        folder=folder,
        base=raw[_BASE],
        rank=_number(folder, "r", raw.get("r", 8), int),
        alpha=_number(folder, "lora_alpha", raw.get("lora_alpha", 8)),
        rank_pattern=_pattern(folder, "rank_pattern", raw.get("rank_pattern"), int),
        alpha_pattern=_pattern(folder, "alpha_pattern", raw.get("alpha_pattern")),
        by_root=bool(raw.get("use_rslora")),
    )


def _check_field(folder: Path, name: str, value: Any) -> None:
    if name in (_BASE, "r", "lora_alpha", "use_rslora", *_PATTERNS, *_WITHOUT_EFFECT):
        return
    got = f"with {name} = {value!r:.60}"
    if name in _ALLOWED:
        if value not in _ALLOWED[name]:
            words = " or ".join(repr(v) for v in _ALLOWED[name] if v is not None)
            raise _bad(folder, got, f"{name} = {words}")
    elif value:
        raise _bad(folder, got, f"no {name}")


def _pattern(folder: Path, name: str, value: Any, kind: type = float) -> dict[str, Any]:
    if not isinstance(value or {}, Mapping):
        raise _bad(folder, f"with {name} = {value!r:.60}", "an object")
    for regex, number in (value or {}).items():
        _number(folder, name, number, kind)
        try:
            re.compile(regex)
        except re.error as error:
            got = f"with {name} {regex!r}: {error}"
            raise _bad(folder, got, "regular expressions") from error
    return dict(value or {})


def _number(folder: Path, name: str, value: Any, kind: type = float) -> Any:
    is_number = type(value) is int or (kind is float and type(value) is float)
    if not is_number or not 0 < value < math.inf:
        words = "a whole number above 0" if kind is int else "a number above 0"
        raise _bad(folder, f"with {name} = {value!r:.60}", words)
    return value


def _matched(pattern: Mapping[str, Any], module: str, usual: Any) -> Any:
    """Return the value of the first regex at the end of the module's name, as PEFT."""
    for regex, value in pattern.items():
        if re.match(rf"(.*\.)?({regex})$", module):
            return value
    return usual


def _bad(folder: Path, got: str, allowed: str) -> BadInput:
    return BadInput(
        got=f"adapters in {str(folder)!r} {got}",
        allowed=f"{allowed}, in an {ADAPTER_CONFIG} of PEFT's LoRA",
        fix="merge them with PEFT, merge_and_unload().save_pretrained(FOLDER), and "
        "give that folder",
    )
