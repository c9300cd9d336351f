# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of a projection onto the vocabulary, with a limit on logits in memory.

Legend: B sequences, L positions, D residual width, V padded vocabulary, or the table
rows of a block; M blocks of T tokens each, N = M x T; K strips of R rows each.

If there are few logits, they are computed at once and kept for the backward pass. If
there are many, they are computed in blocks: blocks of tokens for the loss and the
input's gradient, blocks of words for the table's gradient. Blocks compute the logits
three times, two products more than if all were kept, but their memory does not grow
with B, L and V. Owns these two forms and their custom derivatives. Does not own the
norm before the projection nor the table (`head.py`).
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

WHOLE_BYTES = 2 * 2**30  # limit of all logits in fp32, if they are kept
BLOCK_BYTES = 128 * 2**20  # limit of the logits of a block, in the table's dtype
STRIPS = 16  # of the table; a block has rows of each, so of each device with rows


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The terms of a token's loss.

    Rows of the table from `vocab_size` on take no part. A share `label_smoothing` of
    each target is spread evenly over all words (arXiv 1512.00567, section 7). `z_loss`
    times the squared logarithm of the softmax denominator is added (arXiv 2204.02311,
    section 5).
    """

    vocab_size: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def cross_entropy(
    y_BLD: jax.Array,
    table_VD: jax.Array,
    targets_BL: jax.Array,
    *,
    terms: LossTerms,
) -> jax.Array:
    """Return the cross-entropy of logits y x table summed over tokens, in nats (fp32).

    Negative targets do not count: their loss and its derivative are 0. Logits that take
    more than WHOLE_BYTES in fp32 are computed in blocks of at most BLOCK_BYTES (or one
    token).
    """
    num_tokens, num_logits = targets_BL.size, targets_BL.size * table_VD.shape[0]
    if 4 * num_logits <= WHOLE_BYTES:
        logits_BLV = jnp.einsum("bld,vd->blv", y_BLD, table_VD)
        return jnp.sum(_of_logits(terms, logits_BLV, targets_BL))
    least = -(-num_logits * table_VD.dtype.itemsize // BLOCK_BYTES)
    blocks = _Blocks(num_tokens, _number(num_tokens, least))
    y_MTD, targets_MT = blocks.cut(y_BLD, 0), blocks.cut(targets_BL, -1)
    return _in_blocks(terms, y_MTD, table_VD, targets_MT)


def masked(
    logits_V: jax.Array, vocab_size: int, index_V: jax.Array | None = None
) -> jax.Array:
    """Return the logits (last dim V) in fp32, with -inf for padding.

    They belong to the words `index_V` (None: to all words in order).
    """
    z_V = logits_V.astype(jnp.float32)
    if index_V is None and vocab_size == logits_V.shape[-1]:
        return z_V
    return jnp.where(_vocab_index(z_V, index_V) < vocab_size, z_V, -jnp.inf)


# A custom derivative: the only [B, L, V] arrays kept are the logits in compute dtype
# and their cotangent; fp32 values of that size live inside fusions.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_logits(
    terms: LossTerms, logits_BLV: jax.Array, targets_BL: jax.Array
) -> jax.Array:
    return _of_logits_forward(terms, logits_BLV, targets_BL)[0]


def _of_logits_forward(
    terms: LossTerms, logits_BLV: jax.Array, targets_BL: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    loss_BL, log_total_BL = _losses(terms, logits_BLV, targets_BL)
    return loss_BL, (logits_BLV, targets_BL, log_total_BL)


def _of_logits_backward(
    terms: LossTerms, saved: tuple[jax.Array, ...], d_BL: jax.Array
) -> tuple[jax.Array, None]:
    logits_BLV, targets_BL, log_total_BL = saved
    return _slopes(terms, logits_BLV, None, targets_BL, log_total_BL, d_BL), None


_of_logits.defvjp(_of_logits_forward, _of_logits_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_blocks(
    terms: LossTerms, y_MTD: jax.Array, table_VD: jax.Array, targets_MT: jax.Array
) -> jax.Array:
    return _in_blocks_forward(terms, y_MTD, table_VD, targets_MT)[0]


def _in_blocks_forward(
    terms: LossTerms, y_MTD: jax.Array, table_VD: jax.Array, targets_MT: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def add(loss: jax.Array, block: tuple[jax.Array, jax.Array]):
        y_TD, targets_T = block
        logits_TV = jnp.einsum("td,vd->tv", y_TD, table_VD)
        loss_T, log_total_T = _losses(terms, logits_TV, targets_T)
        return loss + jnp.sum(loss_T), log_total_T

    zero = jnp.zeros((), jnp.float32)
    loss, log_total_MT = jax.lax.scan(add, zero, (y_MTD, targets_MT))
    return loss, (y_MTD, table_VD, targets_MT, log_total_MT)


def _in_blocks_backward(
    terms: LossTerms, saved: tuple[jax.Array, ...], d: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    y_MTD, table_VD, targets_MT, log_total_MT = saved
    d_MT = jnp.broadcast_to(d, targets_MT.shape)
    of_tokens = y_MTD, targets_MT, log_total_MT, d_MT
    d_MTD = _input_slopes(terms, table_VD, *of_tokens)
    return d_MTD, _table_slopes(terms, table_VD, *of_tokens), None


_in_blocks.defvjp(_in_blocks_forward, _in_blocks_backward)


def _input_slopes(
    terms: LossTerms, table_VD: jax.Array, *of_tokens: jax.Array
) -> jax.Array:
    """Return d_MTD, computed one block of tokens at a time."""

    def block_slopes(block: tuple[jax.Array, ...]) -> jax.Array:
        y_TD, *given_T = block
        logits_TV = jnp.einsum("td,vd->tv", y_TD, table_VD)
        d_TV = _slopes(terms, logits_TV, None, *given_T)
        return jnp.einsum("tv,vd->td", d_TV, table_VD)

    return jax.lax.map(block_slopes, of_tokens)


def _table_slopes(
    terms: LossTerms, table_VD: jax.Array, *of_tokens: jax.Array
) -> jax.Array:
    """Return d_VD, computed for all tokens, some rows of each strip at a time.

    Each row is summed in one product and written once. Each block of tokens would
    instead read and write all of a second table, in fp32, to add to it. The last block
    of a strip repeats some rows of the one before, so that all blocks are equal.
    """
    V, D = table_VD.shape
    K = math.gcd(V, STRIPS)
    y_ND, *given_N = (x.reshape(-1, *x.shape[2:]) for x in of_tokens)
    table_KRD, index_KR = table_VD.reshape(K, -1, D), jnp.arange(V).reshape(K, -1)
    row_bytes = len(y_ND) * K * table_VD.dtype.itemsize
    size = min(max(BLOCK_BYTES // row_bytes, 1), V // K)

    def some_rows(x_KR: jax.Array, start: jax.Array) -> jax.Array:
        some_KR = jax.lax.dynamic_slice_in_dim(x_KR, start, size, axis=1)
        return some_KR.reshape(-1, *x_KR.shape[2:])

    def add_block(d_KRD: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
        logits_NV = jnp.einsum("nd,vd->nv", y_ND, some_rows(table_KRD, start))
        d_NV = _slopes(terms, logits_NV, some_rows(index_KR, start), *given_N)
        d_VD = jnp.einsum("nv,nd->vd", d_NV, y_ND).reshape(K, size, D)
        return jax.lax.dynamic_update_slice_in_dim(d_KRD, d_VD, start, axis=1), None

    starts = jnp.minimum(jnp.arange(0, V // K, size), V // K - size)
    d_KRD, _ = jax.lax.scan(add_block, jnp.zeros_like(table_KRD), starts)
    return d_KRD.reshape(V, D)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The cut of tokens into equal blocks; the padding of the last has target -1."""

    num_tokens: int
    number: int

    def cut(self, x_BL: jax.Array, filling: int) -> jax.Array:
        """Return x_MT, padded with `filling`."""
        size = -(-self.num_tokens // self.number)
        x_N = x_BL.reshape(self.num_tokens, *x_BL.shape[2:])
        padding = [(0, 0)] * x_N.ndim
        padding[0] = (0, self.number * size - self.num_tokens)
        x_N = jnp.pad(x_N, padding, constant_values=filling)
        return x_N.reshape(self.number, size, *x_N.shape[1:])


def _number(num_tokens: int, least: int) -> int:
    """Return the first number of full, equal blocks from `least` to below twice that.

    If there is none, return `least`, or the number of tokens if that is less.
    """
    full = (n for n in range(least, 2 * least) if num_tokens % n == 0)
    return next(full, min(least, num_tokens))


def _losses(
    terms: LossTerms, logits_V: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the losses of tokens, and the logarithms of their softmax denominators."""
    z_V = masked(logits_V, terms.vocab_size)
    log_total = jax.nn.logsumexp(z_V, axis=-1)
    # A masked sum, not a gather: a sharded V then costs one all-reduce of [B, L].
    is_target_V = _vocab_index(z_V) == targets[..., None]
    target = jnp.sum(jnp.where(is_target_V, z_V, 0.0), axis=-1)
    if smoothing := terms.label_smoothing:
        is_word_V = _vocab_index(z_V) < terms.vocab_size
        total = jnp.sum(jnp.where(is_word_V, z_V, 0.0), axis=-1)
        target = (1 - smoothing) * target + smoothing / terms.vocab_size * total
    loss = log_total - target
    if terms.z_loss:
        loss += terms.z_loss * jnp.square(log_total)
    return jnp.where(targets < 0, 0.0, loss), log_total


def _slopes(
    terms: LossTerms,
    logits_V: jax.Array,
    index_V: jax.Array | None,
    targets: jax.Array,
    log_total: jax.Array,
    d: jax.Array,
) -> jax.Array:
    """Return the cotangent of logits, in their dtype; `d` is that of the losses."""
    z_V = masked(logits_V, terms.vocab_size, index_V)
    d = jnp.where(targets < 0, 0.0, d)
    probability_V = jnp.exp(z_V - log_total[..., None])
    if terms.z_loss:
        probability_V *= (1 + 2 * terms.z_loss * log_total)[..., None]
    is_target_V = _vocab_index(z_V, index_V) == targets[..., None]
    target_V = is_target_V.astype(jnp.float32)
    if smoothing := terms.label_smoothing:
        is_word_V = _vocab_index(z_V, index_V) < terms.vocab_size
        share = smoothing / terms.vocab_size
        target_V = (1 - smoothing) * target_V + jnp.where(is_word_V, share, 0.0)
    return ((probability_V - target_V) * d[..., None]).astype(logits_V.dtype)


def _vocab_index(z_V: jax.Array, index_V: jax.Array | None = None) -> jax.Array:
    last = z_V.ndim - 1
    if index_V is None:
        return jax.lax.broadcasted_iota(jnp.int32, z_V.shape, last)
    return jax.lax.broadcast_in_dim(index_V, z_V.shape, (last,))
