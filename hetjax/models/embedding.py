# SPDX-License-Identifier: Apache-2.0
"""The two ends of a model: token embedding, and head with the cross-entropy.

Legend: B sequences, L positions, D residual width, V padded vocabulary, S longest
sequence.
Owns the tables, the padding of the vocabulary and the loss. Does not own which end is
tied to which (`gpt.py`: a tied head's `table` is the embedding's).
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.errors import BadInput
from hetjax.models.norm import Norm, NormConfig
from hetjax.models.parameters import normal
from hetjax.models.requirement import require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingConfig:
    """`num_positions` = 0: no learned positions."""

    padded_vocab_size: int
    hidden_size: int
    num_positions: int = 0

    def __post_init__(self) -> None:
        require_positive(
            "embedding",
            padded_vocab_size=self.padded_vocab_size,
            hidden_size=self.hidden_size,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """Rows of the table from `vocab_size` on are padding."""

    vocab_size: int
    padded_vocab_size: int
    hidden_size: int
    norm: NormConfig

    def __post_init__(self) -> None:
        require_positive(
            "head", vocab_size=self.vocab_size, hidden_size=self.hidden_size
        )
        if self.padded_vocab_size < self.vocab_size:
            raise BadInput(
                got=f"head: padded_vocab_size = {self.padded_vocab_size} below "
                f"vocab_size = {self.vocab_size}",
                allowed=f"padded_vocab_size of {self.vocab_size} or more",
                fix=f"set padded_vocab_size to {padded(self.vocab_size, 128)}",
            )


class Embedding(nnx.Module):
    """Map tokens_BL (int32) to the residual stream x_BLD in the table's dtype."""

    def __init__(self, config: EmbeddingConfig, *, rngs: nnx.Rngs) -> None:
        V, S, D = config.padded_vocab_size, config.num_positions, config.hidden_size
        self.table = normal(rngs, (V, D), ("vocab", None))
        self.positions = normal(rngs, (S, D), (None, None)) if S else None

    def __call__(self, tokens_BL: jax.Array) -> jax.Array:
        x_BLD = jnp.take(self.table[...], tokens_BL, axis=0)
        if self.positions is None:
            return x_BLD
        num_positions = tokens_BL.shape[1]
        return x_BLD + self.positions[:num_positions][None]


class Head(nnx.Module):
    """Final norm and projection onto the vocabulary."""

    def __init__(self, config: HeadConfig, *, rngs: nnx.Rngs) -> None:
        V, D = config.padded_vocab_size, config.hidden_size
        self.config = config
        self.norm = Norm(config.norm, D)
        self.table = normal(rngs, (V, D), ("vocab", None))

    def __call__(self, x_BLD: jax.Array, targets_BL: jax.Array) -> jax.Array:
        """Give the cross-entropy summed over tokens, in nats (fp32 scalar)."""
        logits_BLV = self._project(x_BLD)
        return jnp.sum(_cross_entropy(self.config.vocab_size, logits_BLV, targets_BL))

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """Give fp32 logits_BLV; those of padding are -inf."""
        return _masked(self._project(x_BLD), self.config.vocab_size)

    def _project(self, x_BLD: jax.Array) -> jax.Array:
        return jnp.einsum("bld,vd->blv", self.norm(x_BLD), self.table[...])


def padded(vocab_size: int, multiple: int) -> int:
    """Round the vocabulary up to a multiple."""
    return -(-vocab_size // multiple) * multiple


# An own derivative, so that the only [B, L, V] arrays kept are the logits in compute
# dtype and their cotangent; fp32 values of that size live inside fusions.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(
    vocab_size: int, logits_BLV: jax.Array, targets_BL: jax.Array
) -> jax.Array:
    return _cross_entropy_forward(vocab_size, logits_BLV, targets_BL)[0]


def _cross_entropy_forward(
    vocab_size: int, logits_BLV: jax.Array, targets_BL: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    z_BLV = _masked(logits_BLV, vocab_size)
    log_total_BL = jax.nn.logsumexp(z_BLV, axis=-1)
    # A masked sum, not a gather: a sharded V then costs one all-reduce of [B, L].
    target_BL = jnp.sum(jnp.where(_is_target(z_BLV, targets_BL), z_BLV, 0.0), axis=-1)
    return log_total_BL - target_BL, (logits_BLV, targets_BL, log_total_BL)


def _cross_entropy_backward(
    vocab_size: int, saved: tuple[jax.Array, ...], d_BL: jax.Array
) -> tuple[jax.Array, None]:
    logits_BLV, targets_BL, log_total_BL = saved
    z_BLV = _masked(logits_BLV, vocab_size)
    probability_BLV = jnp.exp(z_BLV - log_total_BL[..., None])
    one_hot_BLV = _is_target(z_BLV, targets_BL).astype(jnp.float32)
    d_BLV = (probability_BLV - one_hot_BLV) * d_BL[..., None]
    return d_BLV.astype(logits_BLV.dtype), None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _masked(logits_BLV: jax.Array, vocab_size: int) -> jax.Array:
    z_BLV = logits_BLV.astype(jnp.float32)
    if vocab_size == logits_BLV.shape[-1]:
        return z_BLV
    return jnp.where(_vocab_index(z_BLV) < vocab_size, z_BLV, -jnp.inf)


def _is_target(z_BLV: jax.Array, targets_BL: jax.Array) -> jax.Array:
    return _vocab_index(z_BLV) == targets_BL[..., None]


def _vocab_index(z_BLV: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, z_BLV.shape, z_BLV.ndim - 1)
