# SPDX-License-Identifier: Apache-2.0
"""The last module of a decoder: final norm, projection onto the vocabulary, loss.

Legend: B sequences, L positions, D residual width, V padded vocabulary.
Owns the module with its config, and the padding of a vocabulary. Does not own the
arithmetic of the loss (`cross_entropy.py`).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.errors import BadInput
from hetjax.models.configs import NormConfig, require_positive
from hetjax.models.cross_entropy import cross_entropy, masked
from hetjax.models.layers import Norm, normal


def padded(vocab_size: int, multiple: int) -> int:
    """Round the vocabulary up to a multiple."""
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """Rows of the table from `vocab_size` on are padding."""

    vocab_size: int
    padded_vocab_size: int
    hidden_size: int
    norm: NormConfig

    def __post_init__(self) -> None:
        require_positive("head", self, exempt=("padded_vocab_size",))
        if self.padded_vocab_size < self.vocab_size:
            raise BadInput(
                got=f"head: padded_vocab_size = {self.padded_vocab_size} below "
                f"vocab_size = {self.vocab_size}",
                allowed=f"padded_vocab_size of {self.vocab_size} or more",
                fix=f"set padded_vocab_size to {padded(self.vocab_size, 128)}",
            )


class Head(nnx.Module):
    """Final norm and projection onto the vocabulary."""

    def __init__(self, config: HeadConfig, *, rngs: nnx.Rngs) -> None:
        V, D = config.padded_vocab_size, config.hidden_size
        self.config = config
        self.norm = Norm(config.norm, D)
        self.table = normal(rngs, (V, D), ("vocab", None))

    def __call__(self, x_BLD: jax.Array, targets_BL: jax.Array) -> jax.Array:
        """Give the cross-entropy summed over tokens, in nats (fp32 scalar)."""
        table_VD, vocab_size = self.table[...], self.config.vocab_size
        y_BLD = self.norm(x_BLD)
        return cross_entropy(y_BLD, table_VD, targets_BL, vocab_size=vocab_size)

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """Give fp32 logits_BLV; those of padding are -inf."""
        logits_BLV = jnp.einsum("bld,vd->blv", self.norm(x_BLD), self.table[...])
        return masked(logits_BLV, self.config.vocab_size)
