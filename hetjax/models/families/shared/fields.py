# SPDX-License-Identifier: Apache-2.0
"""Reads the fields of a `config.json`, and checks the kind of each.

Owns the errors for a field that is missing, has the wrong kind, or requires what our
models do not support, and the list of fields that were not read. Does not own what
fields mean (the families) nor kinds of fields that only one family has
(`Family.kinds`).
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from hetjax.errors import BadInput

Kind = tuple[Callable[[Any], bool], str]  # test of a value, words for allowed values
_SHOWN = 60  # characters of a value in an error
_MOST = 1e18  # the largest number
FULL, WINDOW = "full_attention", "sliding_attention"


def count(most: int, least: int = 1) -> Kind:
    """Return the kind of whole numbers within these limits."""
    allowed = f"a whole number from {least} to {most:,}"
    return lambda value: type(value) is int and least <= value <= most, allowed


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= _MOST


def _is_coefficient(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _MOST


def _are_kinds(value: Any) -> bool:
    return isinstance(value, list) and all(kind in (FULL, WINDOW) for kind in value)


NUMBER: Kind = _is_number, f"a number above 0, up to {_MOST:g}"
COEFFICIENT: Kind = _is_coefficient, "a number, 0 or more"
FLAG: Kind = lambda value: type(value) is bool, "true or false"
_OBJECT: Kind = lambda value: isinstance(value, Mapping), "an object with fields"
# The limit of each: above those of any model, yet checked and built within seconds
BLOCKS, HEADS, WIDTH = count(10_000), count(1 << 16), count(1 << 20)
EXPERTS, VOCABULARY, POSITIONS = count(1 << 16), count(1 << 24), count(1 << 31)
_KINDS: Mapping[str, Kind] = {
    "num_hidden_layers": BLOCKS,
    "max_window_layers": count(10_000, least=0),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), HEADS),
    **dict.fromkeys(("hidden_size", "intermediate_size"), WIDTH),
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("max_position_embeddings", "sliding_window"), POSITIONS),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "factor"), NUMBER),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), NUMBER),
    "original_max_position_embeddings": NUMBER,
    **dict.fromkeys(("tie_word_embeddings", "use_sliding_window"), FLAG),
    **dict.fromkeys(("attention_bias", "mlp_bias"), FLAG),
    **dict.fromkeys(("text_config", "rope_parameters", "rope_scaling"), _OBJECT),
    **dict.fromkeys((FULL, WINDOW), _OBJECT),
    "layer_types": (
        _are_kinds,
        f"a list of {FULL} and {WINDOW}, one for each layer",
    ),
}
# how a model was made, or is stored, named or used: these change none of its numbers
_WITHOUT_EFFECT = frozenset(
    {
        *("architectures", "model_type", "_name_or_path", "transformers_version"),
        *("dtype", "torch_dtype", "initializer_range", "pretraining_tp", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_class"),
        *("attn_implementation", "_attn_implementation", "return_dict"),
        *("task_specific_params", "id2label", "label2id", "transformers.js_config"),
        *("quantization_config", "compression_config"),  # see `quantised_folders.py`
    }
)


class Fields:
    """Fields by name; null counts as missing. Raises BadInput for a wrong kind.

    `kinds` are those of fields that only one family has.
    """

    def __init__(
        self, raw: Mapping[str, Any], name: str, kinds: Mapping[str, Kind] | None = None
    ) -> None:
        self.raw, self.name = raw, name
        self._kinds = {**_KINDS, **(kinds or {})}
        self._read: set[str] = set()
        self._parts: dict[str, Fields] = {}

    def __contains__(self, key: str) -> bool:
        self._read.add(key)
        return self.raw.get(key) is not None

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise KeyError(key)
        return self._checked(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self._checked(key) if key in self else default

    def part(self, key: str) -> "Fields":
        """Return the fields of a nested object, none if it is missing."""
        if key not in self._parts:
            self._parts[key] = Fields(self.get(key, {}), self.name, self._kinds)
        return self._parts[key]

    def require(self, key: str, *allowed: Any) -> None:
        """Raise BadInput for a value that our models do not support."""
        if key in self and self.raw[key] not in allowed:
            self.refuse(key, " or ".join(map(repr, allowed)))

    def without_effect(self, *keys: str) -> None:
        """Mark fields as read: given the other fields, they change nothing."""
        self._read.update(keys)

    def unread(self) -> list[str]:
        """Return the names of non-empty fields that were not read."""
        own = [
            key
            for key, value in self.raw.items()
            if value and key not in self._read and key not in _WITHOUT_EFFECT
        ]
        of_parts = (
            f"{key}.{name}"
            for key, part in self._parts.items()
            for name in part.unread()
        )
        return [*own, *of_parts]

    def _checked(self, key: str) -> Any:
        value = self.raw[key]
        is_good, allowed = self._kinds.get(key, (lambda value: True, ""))
        if not is_good(value):
            self.refuse(key, allowed)
        return value

    def refuse(self, key: str, allowed: str) -> NoReturn:
        """Raise BadInput for the value of a field that is present."""
        value = repr(self.raw[key])
        raise BadInput(
            got=f"model {self.name!r}: {key} = {value[:_SHOWN]}",
            allowed=allowed,
            fix=f"correct or fetch its config.json, or give a model with another {key}",
        )
