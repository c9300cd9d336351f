# SPDX-License-Identifier: Apache-2.0
"""The dense feed-forward halves of a block: GELU for GPT, SwiGLU for Llama.

Legend: B sequences, L positions, D residual width, F inner width.
Owns the two MLPs with pre-norm and residual addition. Does not own experts (`moe.py`).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.models.norm import Norm, NormConfig
from hetjax.models.parameters import STD, normal, zeros
from hetjax.models.requirement import require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpConfig:
    """Widths of either MLP."""

    hidden_size: int
    inner_size: int
    norm: NormConfig
    output_std: float = STD

    def __post_init__(self) -> None:
        require_positive(
            "mlp",
            hidden_size=self.hidden_size,
            inner_size=self.inner_size,
            output_std=self.output_std,
        )


class GeluMlp(nnx.Module):
    """Map x to x + down(gelu(up(norm(x)))), with biases, tanh form of GELU (GPT-2)."""

    def __init__(self, config: MlpConfig, *, rngs: nnx.Rngs) -> None:
        D, F = config.hidden_size, config.inner_size
        self.norm = Norm(config.norm, D)
        self.up = normal(rngs, (D, F), (None, "mlp"))
        self.up_bias = zeros((F,), ("mlp",))
        self.down = normal(rngs, (F, D), ("mlp", None), config.output_std)
        self.down_bias = zeros((D,), (None,))

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        y_BLF = jnp.einsum("bld,df->blf", self.norm(x_BLD), self.up[...])
        y_BLF = jax.nn.gelu(y_BLF + self.up_bias[...][None, None, :], approximate=True)
        y_BLD = jnp.einsum("blf,fd->bld", y_BLF, self.down[...])
        return x_BLD + y_BLD + self.down_bias[...][None, None, :]


class SwigluMlp(nnx.Module):
    """Map x to x + down(silu(gate(norm(x))) * up(norm(x))) (arXiv 2002.05202)."""

    def __init__(self, config: MlpConfig, *, rngs: nnx.Rngs) -> None:
        D, F = config.hidden_size, config.inner_size
        self.norm = Norm(config.norm, D)
        self.gate = normal(rngs, (D, F), (None, "mlp"))
        self.up = normal(rngs, (D, F), (None, "mlp"))
        self.down = normal(rngs, (F, D), ("mlp", None), config.output_std)

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        y_BLD = self.norm(x_BLD)
        gate_BLF = jnp.einsum("bld,df->blf", y_BLD, self.gate[...])
        up_BLF = jnp.einsum("bld,df->blf", y_BLD, self.up[...])
        inner_BLF = jax.nn.silu(gate_BLF) * up_BLF
        return x_BLD + jnp.einsum("blf,fd->bld", inner_BLF, self.down[...])
