# SPDX-License-Identifier: Apache-2.0
"""A custom model that is no transformer: running means in place of attention.

    hetjax train experiments.own_model:model --steps 20

Legend: B sequences, L positions, D residual width, F inner width, V vocabulary.
`hetjax/models/model.py` says what a module needs: parameters with the names of their
dims, the residual stream as input and output, and at the end a loss summed over tokens.
Tensor-parallel stages cut dims named "mlp" and "vocab".
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.models.model import Layer, Model, ModuleSpec

NUM_BLOCKS = 4


@dataclass(frozen=True)
class Sizes:
    """The modules' sizes; any config works that is frozen and hashable."""

    vocab_size: int = 1_024
    width: int = 64
    inner_width: int = 256


def weight(
    rngs: nnx.Rngs, shape: tuple[int, ...], dims: tuple[str | None, ...]
) -> nnx.Param[jax.Array]:
    return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape), logical=dims)


def normed(x_BLD: jax.Array) -> jax.Array:
    """Scale each position to a root mean square of 1."""
    square_BL1 = jnp.mean(jnp.square(x_BLD), axis=-1, keepdims=True)
    return x_BLD * jax.lax.rsqrt(square_BL1 + 1e-5)


class Embedding(nnx.Module):
    """Maps tokens to the residual stream."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs) -> None:
        self.table = weight(rngs, (sizes.vocab_size, sizes.width), ("vocab", None))

    def __call__(self, tokens_BL: jax.Array) -> jax.Array:
        return self.table[...][tokens_BL]


class Mixer(nnx.Module):
    """Adds to each position a product of itself and the mean of all up to it."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs) -> None:
        shape = sizes.width, sizes.inner_width
        self.here = weight(rngs, shape, (None, "mlp"))
        self.before = weight(rngs, shape, (None, "mlp"))
        self.out = weight(rngs, shape[::-1], ("mlp", None))

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        y_BLD = normed(x_BLD)
        counts_L = jnp.arange(1, y_BLD.shape[1] + 1, dtype=y_BLD.dtype)
        mean_BLD = jnp.cumsum(y_BLD, axis=1) / counts_L[None, :, None]
        inner_BLF = y_BLD @ self.here[...] * jax.nn.silu(mean_BLD @ self.before[...])
        return x_BLD + inner_BLF @ self.out[...]


class Head(nnx.Module):
    """Maps the residual stream to a loss, with the embedding's table."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs) -> None:
        self.table = weight(rngs, (sizes.vocab_size, sizes.width), ("vocab", None))

    def __call__(self, x_BLD: jax.Array, targets_BL: jax.Array) -> jax.Array:
        log_BLV = jax.nn.log_softmax(self.logits(x_BLD))
        index_BL1 = jnp.maximum(targets_BL, 0)[..., None]
        loss_BL = -jnp.take_along_axis(log_BLV, index_BL1, axis=-1)[..., 0]
        return jnp.sum(jnp.where(targets_BL < 0, 0.0, loss_BL))  # below 0: not counted

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        logits_BLV = jnp.einsum("bld,vd->blv", normed(x_BLD), self.table[...])
        return logits_BLV.astype(jnp.float32)


def model() -> Model:
    """Return the layers, each at its own path; the head's table is tied."""
    sizes = Sizes()
    inner = [f"block_{index:03d}.mixer" for index in range(NUM_BLOCKS)]
    tied = (("table", "embedding.table"),)
    return Model(
        name="own",
        layers=(
            Layer("embedding", (ModuleSpec("embedding", Embedding, sizes),)),
            *(Layer(path, (ModuleSpec(path, Mixer, sizes),)) for path in inner),
            Layer("head", (ModuleSpec("head", Head, sizes, tied),)),
        ),
        vocab_size=sizes.vocab_size,
        max_seq_len=256,
    )
