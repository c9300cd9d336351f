# SPDX-License-Identifier: Apache-2.0
"""The sizes of a decoder as configs, which need no JAX.

Owns the configs of whole models and what configs refuse, so that a name or a size that
cannot be is told at once. Does not own the modules that configs describe (`layers.py`,
`moe.py`) nor sizes that have a name (`presets.py`).
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from hetjax.errors import BadInput


def require_positive(owner: str, config: Any, exempt: tuple[str, ...] = ()) -> None:
    """Raise BadInput unless every number of the config, a dataclass, is above zero."""
    for name in (field.name for field in fields(config) if field.name not in exempt):
        value = getattr(config, name)
        if isinstance(value, int | float) and value <= 0:
            raise BadInput(
                got=f"{owner}: {name} = {value}",
                allowed=f"{name} above 0",
                fix=f"set {name} to 1 or more",
            )


def require_divides(owner: str, config: Any, name: str, of: str) -> None:
    """Raise BadInput unless the field `name` of the config divides its field `of`."""
    value, total = getattr(config, name), getattr(config, of)
    if total % value:
        divisors = [d for d in range(1, total + 1) if total % d == 0]
        near = sorted(divisors, key=lambda d: abs(d - value))[:3]
        raise BadInput(
            got=f"{owner}: {name} = {value} does not divide {of} = {total}",
            allowed=f"a {name} that divides {total}, such as {sorted(near)}",
            fix=f"set {name} to {near[0]}, or change {of}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NormConfig:
    """`rms` has a scale; `layer` subtracts the mean and has a scale and a bias."""

    kind: Literal["rms", "layer"]
    eps: float = 1e-5

    def __post_init__(self) -> None:
        require_positive("norm", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Who takes a token, and how many one expert may take."""

    num_experts: int
    top_k: int
    capacity_factor: float = 1.25
    balance_coefficient: float = 0.01

    def __post_init__(self) -> None:
        require_positive("routing", self, exempt=("balance_coefficient",))
        if self.top_k > self.num_experts:
            raise BadInput(
                got=f"routing: top_k = {self.top_k} of {self.num_experts} experts",
                allowed=f"top_k from 1 to {self.num_experts}",
                fix=f"set top_k to {self.num_experts} or less",
            )
        if self.balance_coefficient < 0:
            raise BadInput(
                got=f"routing: balance_coefficient = {self.balance_coefficient}",
                allowed="0 (no balance loss) or more",
                fix="set balance_coefficient to 0.01",
            )

    def capacity(self, seq_len: int) -> int:
        """Tokens of one sequence that one expert takes; never more than there are."""
        even_share = self.top_k * seq_len / self.num_experts
        return min(seq_len, math.ceil(even_share * self.capacity_factor))


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """What all families have; with the grain `half` plans may cut within blocks."""

    name: str
    vocab_size: int
    hidden_size: int
    num_blocks: int
    num_heads: int
    max_seq_len: int
    vocab_multiple: int = 128
    grain: Literal["block", "half"] = "block"

    def __post_init__(self) -> None:
        require_positive(self.name, self)
        require_divides(self.name, self, "num_heads", "hidden_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig(DecoderConfig):
    """A GPT-2 or GPT-3 shaped decoder; its MLP is 4 x hidden_size wide."""

    max_seq_len: int = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig(DecoderConfig):
    """A Llama or (with `routing`) Mixtral shaped decoder."""

    inner_size: int
    num_kv_heads: int
    rope_theta: float = 10_000.0
    norm: NormConfig = NormConfig(kind="rms", eps=1e-5)
    routing: Routing | None = None  # None: one dense MLP per block

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        require_divides(self.name, self, "num_kv_heads", "num_heads")
