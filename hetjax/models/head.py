# SPDX-License-Identifier: Apache-2.0
"""The last module of a decoder: final norm, projection onto the vocabulary, loss.

Legend: B sequences, L positions, D residual width, V padded vocabulary.
Owns the module with its config, and the padding of a vocabulary. Does not own the
arithmetic of the loss (`cross_entropy.py`).
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.errors import BadInput
from hetjax.models.configs import NormConfig, require_positive
from hetjax.models.cross_entropy import LossTerms, cross_entropy, masked
from hetjax.models.layers import Norm, normal, scaled
from hetjax.models.model import Layer, Model, ModuleSpec


def padded(vocab_size: int, multiple: int) -> int:
    """Round the vocabulary up to a multiple."""
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """Rows of the table from `vocab_size` on are padding; logits are divided by
    `logit_divisor`; `LossTerms` explains the terms of the loss."""

    vocab_size: int
    padded_vocab_size: int
    hidden_size: int
    norm: NormConfig
    logit_divisor: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        terms = "label_smoothing", "z_loss"
        require_positive("head", self, exempt=("padded_vocab_size", *terms))
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
        """Return the loss summed over tokens, in nats (fp32 scalar)."""
        of = self.config
        terms = LossTerms(of.vocab_size, of.label_smoothing, of.z_loss)
        y_BLD = self._normed(x_BLD)
        return cross_entropy(y_BLD, self.table[...], targets_BL, terms=terms)

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """Return fp32 logits_BLV; those of padding are -inf."""
        logits_BLV = jnp.einsum("bld,vd->blv", self._normed(x_BLD), self.table[...])
        return masked(logits_BLV, self.config.vocab_size)

    def _normed(self, x_BLD: jax.Array) -> jax.Array:
        """Return the projection's input, divided here so that logits need not be."""
        return scaled(self.norm(x_BLD), 1 / self.config.logit_divisor)


def with_loss(model: Model, *, label_smoothing: float, z_loss: float) -> Model:
    """Return the model that is trained with these terms of the loss.

    Raises BadInput if the last module is not `Head`.
    """
    *body, last = model.layers
    *before, head = last.modules
    if not isinstance(head.config, HeadConfig):
        raise BadInput(
            got=f"label smoothing or z-loss for model {model.name}, whose last module "
            f"is {head.cls.__name__}",
            allowed="models that end with hetjax.models.head.Head",
            fix="leave --train.label-smoothing and --train.z-loss out, or add the "
            "terms in your own module",
        )
    terms = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    head = replace(head, config=replace(head.config, **terms))
    layers = (*body, Layer(last.name, (*before, head)))
    return replace(model, layers=layers)


def validating(spec: ModuleSpec) -> ModuleSpec:
    """Return the module for validation: a head has only its cross-entropy."""
    if not isinstance(spec.config, HeadConfig):
        return spec
    plain = replace(spec.config, label_smoothing=0.0, z_loss=0.0)
    return replace(spec, config=plain)
