# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of a projection onto the vocabulary, never of more logits than fit.

Legend: B sequences, L positions, D residual width, V padded vocabulary; M blocks of T
tokens each.

Few logits are made at once and kept for the backward pass. Many are made in blocks of
tokens, and again for the derivative: one product more than with all of them kept, for
memory that does not grow with B and L. Owns these two forms with derivatives of their
own. Does not own the norm before nor the table (`head.py`).
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from hetjax.models.model import made_again

WHOLE_BYTES = 2 * 2**30  # of all logits in fp32, if they are kept
BLOCK_BYTES = 128 * 2**20  # of those of a block, if they are not


def cross_entropy(
    y_BLD: jax.Array,
    table_VD: jax.Array,
    targets_BL: jax.Array,
    *,
    vocab_size: int,
) -> jax.Array:
    """Give the cross-entropy of logits y x table summed over tokens, in nats (fp32).

    Negative targets do not count: their loss is 0, and so is its derivative. Rows of
    the table from `vocab_size` on take no part. Logits that take more than
    WHOLE_BYTES in fp32 are made in blocks of at most BLOCK_BYTES (or one token).
    """
    num_tokens, logits_bytes = targets_BL.size, 4 * targets_BL.size * table_VD.shape[0]
    if logits_bytes <= WHOLE_BYTES:
        logits_BLV = jnp.einsum("bld,vd->blv", y_BLD, table_VD)
        return jnp.sum(_of_logits(vocab_size, logits_BLV, targets_BL))
    blocks = _Blocks(num_tokens, _number(num_tokens, -(-logits_bytes // BLOCK_BYTES)))
    y_MTD, targets_MT = blocks.cut(y_BLD, 0), blocks.cut(targets_BL, -1)
    return _in_blocks(vocab_size, y_MTD, table_VD, targets_MT)


def masked(logits_V: jax.Array, vocab_size: int) -> jax.Array:
    """Give the logits (last dim V) in fp32, those of padding as -inf."""
    z_V = logits_V.astype(jnp.float32)
    if vocab_size == logits_V.shape[-1]:
        return z_V
    return jnp.where(_vocab_index(z_V) < vocab_size, z_V, -jnp.inf)


# An own derivative, so that the only [B, L, V] arrays kept are the logits in compute
# dtype and their cotangent; fp32 values of that size live inside fusions.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_logits(
    vocab_size: int, logits_BLV: jax.Array, targets_BL: jax.Array
) -> jax.Array:
    return _of_logits_forward(vocab_size, logits_BLV, targets_BL)[0]


def _of_logits_forward(
    vocab_size: int, logits_BLV: jax.Array, targets_BL: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    loss_BL, log_total_BL = _losses(vocab_size, logits_BLV, targets_BL)
    return loss_BL, (logits_BLV, targets_BL, log_total_BL)


def _of_logits_backward(
    vocab_size: int, saved: tuple[jax.Array, ...], d_BL: jax.Array
) -> tuple[jax.Array, None]:
    logits_BLV, targets_BL, log_total_BL = saved
    return _slopes(vocab_size, logits_BLV, targets_BL, log_total_BL, d_BL), None


_of_logits.defvjp(_of_logits_forward, _of_logits_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_blocks(
    vocab_size: int, y_MTD: jax.Array, table_VD: jax.Array, targets_MT: jax.Array
) -> jax.Array:
    return _in_blocks_forward(vocab_size, y_MTD, table_VD, targets_MT)[0]


def _in_blocks_forward(
    vocab_size: int, y_MTD: jax.Array, table_VD: jax.Array, targets_MT: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def add(loss: jax.Array, block: tuple[jax.Array, jax.Array]):
        y_TD, targets_T = block
        logits_TV = jnp.einsum("td,vd->tv", y_TD, table_VD)
        loss_T, log_total_T = _losses(vocab_size, logits_TV, targets_T)
        return loss + jnp.sum(loss_T), log_total_T

    zero = jnp.zeros((), jnp.float32)
    loss, log_total_MT = jax.lax.scan(add, zero, (y_MTD, targets_MT))
    return loss, (y_MTD, table_VD, targets_MT, log_total_MT)


def _in_blocks_backward(
    vocab_size: int, saved: tuple[jax.Array, ...], d: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    y_MTD, table_VD, targets_MT, log_total_MT = saved

    @made_again
    def slopes(y_TD: jax.Array, table_VD: jax.Array, *given: jax.Array) -> jax.Array:
        logits_TV = jnp.einsum("td,vd->tv", y_TD, table_VD)
        return _slopes(vocab_size, logits_TV, *given)

    def add(d_VD: jax.Array, block: tuple[jax.Array, ...]):
        y_TD, targets_T, log_total_T = block
        d_TV = slopes(y_TD, table_VD, targets_T, log_total_T, d)
        d_VD += jnp.einsum("tv,td->vd", d_TV, y_TD, preferred_element_type=jnp.float32)
        return d_VD, jnp.einsum("tv,vd->td", d_TV, table_VD)

    zeros_VD = jnp.zeros_like(table_VD, jnp.float32)
    blocks = y_MTD, targets_MT, log_total_MT
    d_VD, d_MTD = jax.lax.scan(add, zeros_VD, blocks)
    return d_MTD, d_VD.astype(table_VD.dtype), None


_in_blocks.defvjp(_in_blocks_forward, _in_blocks_backward)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """How tokens are cut into equal blocks; what fills the last has target -1."""

    num_tokens: int
    number: int

    def cut(self, x_BL: jax.Array, filling: int) -> jax.Array:
        """x_MT."""
        size = -(-self.num_tokens // self.number)
        x_N = x_BL.reshape(self.num_tokens, *x_BL.shape[2:])
        padding = [(0, 0)] * x_N.ndim
        padding[0] = (0, self.number * size - self.num_tokens)
        x_N = jnp.pad(x_N, padding, constant_values=filling)
        return x_N.reshape(self.number, size, *x_N.shape[1:])


def _number(num_tokens: int, least: int) -> int:
    """At least so many blocks; up to twice as many if they then are all full."""
    full = (n for n in range(least, 2 * least) if num_tokens % n == 0)
    return next(full, min(least, num_tokens))


def _losses(
    vocab_size: int, logits_V: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Losses of tokens, and the logarithms of what their softmax divides by."""
    z_V = masked(logits_V, vocab_size)
    log_total = jax.nn.logsumexp(z_V, axis=-1)
    # A masked sum, not a gather: a sharded V then costs one all-reduce of [B, L].
    target = jnp.sum(jnp.where(_is_target(z_V, targets), z_V, 0.0), axis=-1)
    return jnp.where(targets < 0, 0.0, log_total - target), log_total


def _slopes(
    vocab_size: int,
    logits_V: jax.Array,
    targets: jax.Array,
    log_total: jax.Array,
    d: jax.Array,
) -> jax.Array:
    """The cotangent of logits, in their dtype; `d` is that of losses."""
    z_V = masked(logits_V, vocab_size)
    d = jnp.where(targets < 0, 0.0, d)
    probability_V = jnp.exp(z_V - log_total[..., None])
    one_hot_V = _is_target(z_V, targets).astype(jnp.float32)
    return ((probability_V - one_hot_V) * d[..., None]).astype(logits_V.dtype)


def _is_target(z_V: jax.Array, targets: jax.Array) -> jax.Array:
    return _vocab_index(z_V) == targets[..., None]


def _vocab_index(z_V: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, z_V.shape, z_V.ndim - 1)
