# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm, computed in fp32 whatever the dtype around them.

Legend: B sequences, L positions, D residual width.
Owns the norms. Does not own the modules that start with one.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.models.parameters import ones, zeros
from hetjax.models.requirement import require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class NormConfig:
    """`rms` has a scale; `layer` subtracts the mean and has a scale and a bias."""

    kind: Literal["rms", "layer"]
    eps: float = 1e-5

    def __post_init__(self) -> None:
        require_positive("norm", eps=self.eps)


class Norm(nnx.Module):
    """Normalise the last dim; mapped in fp32, given back in the dtype of the input."""

    def __init__(self, config: NormConfig, size: int) -> None:
        self.config = config
        self.scale = ones((size,), (None,))
        self.bias = zeros((size,), (None,)) if config.kind == "layer" else None

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        y_BLD = x_BLD.astype(jnp.float32)
        if self.bias is not None:
            y_BLD -= jnp.mean(y_BLD, axis=-1, keepdims=True)
        variance_BL1 = jnp.mean(jnp.square(y_BLD), axis=-1, keepdims=True)
        y_BLD *= jax.lax.rsqrt(variance_BL1 + self.config.eps)
        y_BLD *= _along_last(self.scale)
        if self.bias is not None:
            y_BLD += _along_last(self.bias)
        return y_BLD.astype(x_BLD.dtype)


def _along_last(parameter: nnx.Param) -> jax.Array:
    return parameter[...].astype(jnp.float32)[None, None, :]
