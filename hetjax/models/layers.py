# SPDX-License-Identifier: Apache-2.0
"""Defines the modules of decoders except attention and head: norms, MLPs, embedding.

Legend: B sequences, L positions, D residual width, F inner width, V padded vocabulary,
S longest sequence, N = B x L tokens.
Owns these modules with their configs, and initial values for all modules (as GPT-2).
Does not own attention (`attention/`), the head (`head.py`), experts (`experts/`),
configs of whole models and the checks of configs (`configs.py`), which modules make up
a model, nor which parameters are tied (`decoders.py`: the `table` of a tied head is the
embedding's).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.models.configs import NormConfig, require_positive
from hetjax.models.linear.adapters import linear
from hetjax.models.model import PositionWise
from hetjax.models.positions import positions_within

Logical = tuple[str | None, ...]
STD = 0.02


def normal(
    rngs: nnx.Rngs, shape: tuple[int, ...], logical: Logical, std: float = STD
) -> nnx.Param:
    """Make an fp32 parameter drawn from N(0, std^2)."""
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * std
    return nnx.Param(value, logical=logical)


def linear_weight(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    logical: Logical,
    std: float = STD,
    *,
    num_inputs: int = 1,
) -> nnx.Param:
    """Make such a parameter for `linear`; its first `num_inputs` dims are inputs."""
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * std
    return nnx.Param(value, logical=logical, num_inputs=num_inputs)


def expert_weights(
    rngs: nnx.Rngs, shape: tuple[int, ...], logical: Logical, std: float = STD
) -> nnx.Param:
    """Make a parameter with a linear weight per expert: (expert, inputs, outputs).

    It has no adapter.
    """
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * std
    return nnx.Param(value, logical=logical, num_inputs=2, of_experts=True)


def zeros(shape: tuple[int, ...], logical: Logical) -> nnx.Param:
    """Make an fp32 parameter of zeros (biases)."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), logical=logical)


def residual_std(num_blocks: int) -> float:
    """Return the std of the 2 x num_blocks projections into the residual stream."""
    return STD / math.sqrt(2 * num_blocks)


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Multiply by a number in fp32: in lower precision the number would be rounded."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)


class Norm(nnx.Module):
    """Normalise the last dim, computed in fp32, returned in the dtype of the input."""

    def __init__(self, config: NormConfig, size: int) -> None:
        self.config = config
        start = jnp.full((size,), 0.0 if config.around_one else 1.0, jnp.float32)
        self.scale = nnx.Param(start, logical=(None,))
        self.bias = zeros((size,), (None,)) if config.kind == "layer" else None

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        y_BLD = x_BLD.astype(jnp.float32)
        if self.bias is not None:
            y_BLD -= jnp.mean(y_BLD, axis=-1, keepdims=True)
        variance_BL1 = jnp.mean(jnp.square(y_BLD), axis=-1, keepdims=True)
        y_BLD *= jax.lax.rsqrt(variance_BL1 + self.config.eps)
        scale = _along_last(self.scale, y_BLD.ndim)
        y_BLD *= 1 + scale if self.config.around_one else scale
        if self.bias is not None:
            y_BLD += _along_last(self.bias, y_BLD.ndim)
        return y_BLD.astype(x_BLD.dtype)


def _along_last(parameter: nnx.Param, num_dims: int) -> jax.Array:
    return parameter[...].astype(jnp.float32).reshape((1,) * (num_dims - 1) + (-1,))


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpConfig:
    """Widths of either MLP, and the activation of a gated one.

    With `post_norm`, the output of a gated MLP is normalised by `norm`. It is
    multiplied by `residual_scale` before it is added to the residual stream. `GeluMlp`
    has biases whatever `biases` says.
    """

    hidden_size: int
    inner_size: int
    norm: NormConfig
    output_std: float = STD
    activation: Literal["silu", "gelu"] = "silu"
    biases: bool = False
    post_norm: bool = False
    residual_scale: float = 1.0

    def __post_init__(self) -> None:
        require_positive("mlp", self)


class GeluMlp(PositionWise):
    """Map x to x + down(gelu(up(norm(x)))), with biases, tanh form of GELU (GPT-2)."""

    def __init__(self, config: MlpConfig, *, rngs: nnx.Rngs) -> None:
        D, F = config.hidden_size, config.inner_size
        self.norm = Norm(config.norm, D)
        self.up = linear_weight(rngs, (D, F), (None, "mlp"))
        self.up_bias = zeros((F,), ("mlp",))
        self.down = linear_weight(rngs, (F, D), ("mlp", None), config.output_std)
        self.down_bias = zeros((D,), (None,))

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        y_BLF = linear("bld,df->blf", self.norm(x_BLD), self.up)
        y_BLF = jax.nn.gelu(y_BLF + self.up_bias[...][None, None, :], approximate=True)
        y_BLD = linear("blf,fd->bld", y_BLF, self.down)
        return x_BLD + y_BLD + self.down_bias[...][None, None, :]


class GatedMlp(PositionWise):
    """Map x to x + down(act(gate(norm(x))) * up(norm(x))) (arXiv 2002.05202).

    The activation is SiLU, or GELU in its tanh form.
    """

    def __init__(self, config: MlpConfig, *, rngs: nnx.Rngs) -> None:
        D, F = config.hidden_size, config.inner_size
        self.config = config
        self.norm = Norm(config.norm, D)
        self.gate = linear_weight(rngs, (D, F), (None, "mlp"))
        self.up = linear_weight(rngs, (D, F), (None, "mlp"))
        self.down = linear_weight(rngs, (F, D), ("mlp", None), config.output_std)
        self.gate_bias = zeros((F,), ("mlp",)) if config.biases else None
        self.up_bias = zeros((F,), ("mlp",)) if config.biases else None
        self.down_bias = zeros((D,), (None,)) if config.biases else None
        self.post_norm = Norm(config.norm, D) if config.post_norm else None

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        y_BLD = self.norm(x_BLD)
        gate_BLF = biased(linear("bld,df->blf", y_BLD, self.gate), self.gate_bias)
        up_BLF = biased(linear("bld,df->blf", y_BLD, self.up), self.up_bias)
        inner_BLF = activated(gate_BLF, self.config.activation) * up_BLF
        y_BLD = biased(linear("blf,fd->bld", inner_BLF, self.down), self.down_bias)
        y_BLD = y_BLD if self.post_norm is None else self.post_norm(y_BLD)
        return x_BLD + scaled(y_BLD, self.config.residual_scale)


def biased(y_BLF: jax.Array, bias: nnx.Param | None) -> jax.Array:
    """Add a bias (F), if there is one."""
    return y_BLF if bias is None else y_BLF + bias[...][None, None, :]


def activated(gate: jax.Array, activation: Literal["silu", "gelu"]) -> jax.Array:
    """Apply the activation to a gate."""
    if activation == "silu":
        return jax.nn.silu(gate)
    return jax.nn.gelu(gate, approximate=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingConfig:
    """`num_positions` = 0: no learned positions; words are multiplied by `scale`."""

    padded_vocab_size: int
    hidden_size: int
    num_positions: int = 0
    scale: float = 1.0

    def __post_init__(self) -> None:
        require_positive("embedding", self, exempt=("num_positions",))


class Embedding(nnx.Module):
    """Map tokens_BL (int32) to the residual stream x_BLD in the table's dtype."""

    def __init__(self, config: EmbeddingConfig, *, rngs: nnx.Rngs) -> None:
        V, S, D = config.padded_vocab_size, config.num_positions, config.hidden_size
        self.config = config
        self.table = normal(rngs, (V, D), ("vocab", None))
        self.positions = normal(rngs, (S, D), (None, None)) if S else None

    def __call__(
        self, tokens_BL: jax.Array, documents_BL: jax.Array | None = None
    ) -> jax.Array:
        x_BLD = self._words(tokens_BL)
        if self.positions is None:
            return x_BLD
        if documents_BL is not None:
            place_BL, num_places = positions_within(documents_BL), len(self.positions)
            places_BLD: Any = _rows(num_places, self.positions[...], place_BL)
            return x_BLD + places_BLD
        num_positions = tokens_BL.shape[1]
        return x_BLD + self.positions[:num_positions][None]

    def keeps(self, num_positions: int) -> tuple[()]:
        """Return no state: an embedding needs only the number of earlier positions."""
        return ()

    def continued(
        self, tokens_BL: jax.Array, kept: tuple[()], start: jax.Array
    ) -> tuple[jax.Array, tuple[()]]:
        """Map the positions from `start` on; any past the last are padding."""
        x_BLD = self._words(tokens_BL)
        if self.positions is None:
            return x_BLD, kept
        index_L = start + jnp.arange(tokens_BL.shape[1], dtype=start.dtype)
        return x_BLD + jnp.take(self.positions[...], index_L, axis=0, mode="clip")[
            None
        ], kept

    def _words(self, tokens_BL: jax.Array) -> jax.Array:
        table_VD = self.table[...]
        x_BLD: Any = _rows(table_VD.shape[0], table_VD, tokens_BL)
        if self.config.scale != 1:  # rounded to the table's dtype, as in Gemma
            x_BLD *= jnp.asarray(self.config.scale, x_BLD.dtype)
        return x_BLD


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(num_words: int, table_VD: jax.Array, tokens_BL: jax.Array) -> jax.Array:
    """Return x_BLD, rows of a table of `num_words` words.

    The table's gradient is summed in fp32 and rounded once. A bf16 sum of equal terms
    stops growing at the 257th, and some tokens occur more often than that in a text.
    """
    return jnp.take(table_VD, tokens_BL, axis=0)


def _rows_forward(
    num_words: int, table_VD: jax.Array, tokens_BL: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return jnp.take(table_VD, tokens_BL, axis=0), tokens_BL


def _rows_backward(
    num_words: int, tokens_BL: jax.Array, d_BLD: jax.Array
) -> tuple[jax.Array, None]:
    D, dtype = d_BLD.shape[-1], d_BLD.dtype
    tokens_N, d_ND = tokens_BL.reshape(-1), d_BLD.reshape(-1, D)
    if dtype != jnp.float32:
        d_ND = _sum_of_equals(num_words, tokens_N, d_ND).astype(dtype)
    return jnp.zeros((num_words, D), dtype).at[tokens_N].add(d_ND), None


_rows.defvjp(_rows_forward, _rows_backward)


def _sum_of_equals(num_words: int, tokens_N: jax.Array, d_ND: jax.Array) -> jax.Array:
    """Sum each token's d in fp32; return the sum at one of its places, 0 at others.

    Takes N x D numbers of memory, whatever the number of words.
    """
    place_V = jnp.zeros(num_words, jnp.int32).at[tokens_N].set(jnp.arange(len(d_ND)))
    sums_ND = jnp.zeros(d_ND.shape, jnp.float32)
    return sums_ND.at[place_V[tokens_N]].add(d_ND.astype(jnp.float32))
