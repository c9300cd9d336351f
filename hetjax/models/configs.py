# SPDX-License-Identifier: Apache-2.0
"""Defines the sizes of a decoder as configs, without JAX.

Owns the configs of whole models and the checks of configs, which refuse an impossible
name or size at once. Does not own the modules that configs describe (`layers.py`,
`experts/`) nor named sizes (`presets.py`).
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from hetjax.errors import BadInput

FrozenForm = Literal["int8", "nf4"]  # quantised forms of frozen weights


def require_positive(owner: str, config: Any, exempt: tuple[str, ...] = ()) -> None:
    """Raise BadInput unless every number of the config, a dataclass, is above zero."""
    for name in (field.name for field in fields(config) if field.name not in exempt):
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if value <= 0:
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
    """`rms` has a scale; `layer` subtracts the mean and has a scale and a bias.

    With `around_one`, the parameter is the scale minus one (Gemma).
    """

    kind: Literal["rms", "layer"]
    eps: float = 1e-5
    around_one: bool = False

    def __post_init__(self) -> None:
        require_positive("norm", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How RoPE is stretched to more positions than the model was first trained on.

    `linear` multiplies the frequency of all dims by 1 / factor. `llama3` does so only
    for slow dims, with less than `low_turns` turns in `original_positions`, and in part
    for dims with up to `high_turns`.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_turns: float = 1.0
    high_turns: float = 4.0
    original_positions: int = 8_192

    def __post_init__(self) -> None:
        require_positive("rope_scaling", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Which experts take a token, and how many tokens one expert may take.

    `capacity_factor` None: all that choose it. If `normalized`, the weights of a
    token's chosen experts sum to one.
    """

    num_experts: int
    top_k: int
    capacity_factor: float | None = 1.25
    balance_coefficient: float = 0.01
    normalized: bool = True

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
        """Return how many tokens of one sequence one expert takes, at most all."""
        if self.capacity_factor is None:
            return seq_len
        even_share = self.top_k * seq_len / self.num_experts
        return min(seq_len, math.ceil(even_share * self.capacity_factor))


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """The fields of all families. With grain `half`, plans may cut within blocks."""

    name: str
    vocab_size: int
    hidden_size: int
    num_blocks: int
    num_heads: int
    max_seq_len: int
    vocab_multiple: int = 128
    grain: Literal["block", "half"] = "block"
    tied: bool = False  # the head's table is the embedding's

    def __post_init__(self) -> None:
        require_positive(self.name, self)


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig(DecoderConfig):
    """A GPT-2 or GPT-3 shaped decoder; its MLP is 4 x hidden_size wide."""

    max_seq_len: int = 1024
    tied: bool = True

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        require_divides(self.name, self, "num_heads", "hidden_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig(DecoderConfig):
    """Llama and its relatives: Qwen, Mistral, Gemma and, with `routing`, Mixtral.

    `windowed` says in which blocks positions see only the last `window` ones: a pattern
    from the first block on, repeated. These blocks have the RoPE base
    `window_rope_theta`, if given, without scaling. `rope_blocks` is such a pattern,
    too: the blocks with RoPE. With norms "around", the outputs of attention and MLP are
    normalised. Whatever `norms` is, `residual_scale` multiplies these outputs.
    """

    inner_size: int
    num_kv_heads: int
    head_size: int | None = None  # None: hidden_size / num_heads
    biases: Literal["none", "qkv", "all"] = "none"  # of attention
    mlp_biases: bool = False
    qk_norm: bool = False
    query_scale: float | None = None  # None: 1 / sqrt(head_size)
    window: int | None = None
    windowed: tuple[bool, ...] = (True,)
    rope_theta: float = 10_000.0
    rope_blocks: tuple[bool, ...] = (True,)
    rope_scaling: RopeScaling | None = None
    window_rope_theta: float | None = None
    activation: Literal["silu", "gelu"] = "silu"
    norm: NormConfig = NormConfig(kind="rms", eps=1e-5)
    norms: Literal["before", "around"] = "before"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    routing: Routing | None = None  # None: one dense MLP per block

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        if self.head_size is None:
            require_divides(self.name, self, "num_heads", "hidden_size")
        require_divides(self.name, self, "num_kv_heads", "num_heads")
        if self.size_of_heads % 2:
            raise BadInput(
                got=f"{self.name}: heads of size {self.size_of_heads}",
                allowed="an even size: RoPE rotates pairs of numbers",
                fix=f"set head_size to {self.size_of_heads + 1}",
            )
        self._check_experts()

    def _check_experts(self) -> None:
        """Raise BadInput for settings that experts do not support."""
        asked = {
            "norms 'around'": self.norms == "around",
            "mlp_biases": self.mlp_biases,
            "a residual_scale": self.residual_scale != 1,
        }
        found = [name for name, is_asked in asked.items() if is_asked]
        if self.routing is not None and found:
            raise BadInput(
                got=f"{self.name}: experts with {' and '.join(found)}",
                allowed="experts without these, or one dense MLP per block",
                fix=f"set routing to None, or leave {' and '.join(found)} out",
            )

    @property
    def size_of_heads(self) -> int:
        return self.head_size or self.hidden_size // self.num_heads

    def has_window(self, block: int) -> bool:
        """Whether positions of that block see only a window of those before them."""
        return self.window is not None and self.windowed[block % len(self.windowed)]

    def has_rope(self, block: int) -> bool:
        """Whether that block rotates queries and keys by position."""
        return self.rope_blocks[block % len(self.rope_blocks)]


# fields that do not change what a model computes from its weights
_NO_NUMBERS = {"name", "max_seq_len", "vocab_size", "vocab_multiple", "grain"}


def numbers(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of a config that change what a model computes."""
    found = {field.name: getattr(config, field.name) for field in fields(config)}
    if isinstance(config, LlamaConfig):
        blocks = range(config.num_blocks)
        found["windowed"] = tuple(config.has_window(block) for block in blocks)
        found["rope_blocks"] = tuple(config.has_rope(block) for block in blocks)
        found["head_size"] = config.size_of_heads
    return {name: found[name] for name in found.keys() - _NO_NUMBERS}
