# SPDX-License-Identifier: Apache-2.0
"""The fields of a `config.json`, each of the kind that it has to be.

Owns what is said of one that is missing, that is of another kind, or that asks for what
our models do not do. Does not own what fields mean (`configs.py`).
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from hetjax.errors import BadInput

_SHOWN = 60  # characters of a value
FULL, WINDOW = "full_attention", "sliding_attention"
# The most of each: above what any model has, and checked and built within seconds
_COUNTS = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 10_000),
    **dict.fromkeys(("sliding_window_pattern", "_sliding_window_pattern"), 10_000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 1 << 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "head_dim"), 1 << 16),
    **dict.fromkeys(("num_experts_per_tok",), 1 << 16),
    **dict.fromkeys(("hidden_size", "intermediate_size", "n_embd"), 1 << 20),
    **dict.fromkeys(("moe_intermediate_size",), 1 << 20),
    **dict.fromkeys(("vocab_size",), 1 << 24),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 1 << 31),
    **dict.fromkeys(("sliding_window",), 1 << 31),
}
_NUMBERS = (
    *("rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar"),
    *("factor", "low_freq_factor", "high_freq_factor"),
    "original_max_position_embeddings",
)
_MOST = 1e18  # of a number
_FLAGS = ("tie_word_embeddings", "use_sliding_window", "norm_topk_prob")
_OBJECTS = ("text_config", "rope_parameters", "rope_scaling", FULL, WINDOW)


class Fields:
    """Fields by name; null is as good as none. BadInput for one of a wrong kind."""

    def __init__(self, raw: Mapping[str, Any], name: str) -> None:
        self.raw, self.name = raw, name

    def __contains__(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise KeyError(key)
        return self._checked(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self._checked(key) if key in self else default

    def part(self, key: str) -> "Fields":
        """The fields of an object among these, none if it is not there."""
        return Fields(self.get(key, {}), self.name)

    def require(self, key: str, *allowed: Any) -> None:
        """Refuse a value that our models do not have."""
        value = self.raw.get(key)
        if value is not None and value not in allowed:
            self.refuse(key, " or ".join(map(repr, allowed)))

    def _checked(self, key: str) -> Any:
        value = self.raw[key]
        is_good, allowed = _KINDS.get(key, (lambda value: True, ""))
        if not is_good(value):
            self.refuse(key, allowed)
        return value

    def refuse(self, key: str, allowed: str) -> NoReturn:
        """Raise BadInput for the value of a field that is there."""
        value = repr(self.raw[key])
        raise BadInput(
            got=f"model {self.name!r}: {key} = {value[:_SHOWN]}",
            allowed=allowed,
            fix=f"fetch or mend its config.json, or give a model with such a {key}",
        )


def _count(most: int, least: int = 1) -> "_Kind":
    allowed = f"a whole number from {least} to {most:,}"
    return lambda value: type(value) is int and least <= value <= most, allowed


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= _MOST


def _is_coefficient(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _MOST


def _are_kinds(value: Any) -> bool:
    return isinstance(value, list) and all(kind in (FULL, WINDOW) for kind in value)


_Kind = tuple[Callable[[Any], bool], str]
_KINDS: Mapping[str, _Kind] = {
    **{name: _count(most) for name, most in _COUNTS.items()},
    "max_window_layers": _count(10_000, least=0),
    **dict.fromkeys(_NUMBERS, (_is_number, f"a number above 0, up to {_MOST:g}")),
    **dict.fromkeys(_FLAGS, (lambda value: type(value) is bool, "true or false")),
    **dict.fromkeys(
        _OBJECTS, (lambda value: isinstance(value, Mapping), "an object with fields")
    ),
    "router_aux_loss_coef": (_is_coefficient, "a number, 0 or more"),
    "layer_types": (_are_kinds, f"a list of {FULL} and {WINDOW}, one for each layer"),
}
