# SPDX-License-Identifier: Apache-2.0
"""Top-k routed experts that drop no token (Mixtral, Qwen3-MoE).

Legend: B sequences, L positions, D residual width, F inner width, E experts, k choices
of a token; R = B L k rows, one for each choice, sorted by expert.

Owns how rows reach their experts and return, and the modules that replace experts with
a capacity where no token may be dropped. Does not own routing and its balance loss
(`moe.py`). Devices that share a stage cut the inner width of all experts (`mlp`), so
that each device has the same work whatever the router does.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.models.experts.moe import Moe, MoeConfig, routed
from hetjax.models.layers import Norm, activated, expert_weights, normal
from hetjax.models.linear.adapters import Held
from hetjax.models.linear.mapped import mapped_like
from hetjax.models.linear.quantised import ragged_product
from hetjax.models.model import AuxLoss, ModuleSpec, PositionWise


class DroplessMoe(PositionWise):
    """Map x to x + the gated sum of its top-k experts of norm(x), as `Moe` does."""

    def __init__(self, config: MoeConfig, *, rngs: nnx.Rngs) -> None:
        D, F, E = config.hidden_size, config.inner_size, config.routing.num_experts
        self.config = config
        self.norm = Norm(config.norm, D)
        self.router = normal(rngs, (D, E), (None, None))
        inwards, outwards = (None, None, "mlp"), (None, "mlp", None)
        self.gate = expert_weights(rngs, (E, D, F), inwards)
        self.up = expert_weights(rngs, (E, D, F), inwards)
        self.down = expert_weights(rngs, (E, F, D), outwards, config.output_std)
        self.balance_loss = AuxLoss(jnp.zeros((), jnp.float32))

    def __call__(
        self, x_BLD: jax.Array, documents_BL: jax.Array | None = None
    ) -> jax.Array:
        y_BLD = self.norm(x_BLD)
        to = routed(self.config.routing, self.router[...], y_BLD, documents_BL)
        self.balance_loss[...] = to.balance_loss
        order_R = jnp.argsort(to.expert_BLk.reshape(-1))
        y_RD = y_BLD.reshape(-1, y_BLD.shape[-1])[order_R // to.expert_BLk.shape[-1]]
        z_RD = self._experts(y_RD, jnp.sum(to.chosen_BLE, axis=(0, 1)))
        weight_R = to.weight_BLk.reshape(-1)[order_R]
        z_RD *= weight_R.astype(z_RD.dtype)[:, None]
        back_RD = jnp.zeros_like(z_RD).at[order_R].set(z_RD, unique_indices=True)
        return x_BLD + jnp.sum(back_RD.reshape(*to.expert_BLk.shape, -1), axis=2)

    def _experts(self, y_RD: jax.Array, rows_E: jax.Array) -> jax.Array:
        """Apply the experts; rows are sorted by expert."""
        gate_RF = _ragged(y_RD, self.gate, rows_E)
        up_RF = _ragged(y_RD, self.up, rows_E)
        inner_RF = activated(gate_RF, self.config.activation) * up_RF
        return _ragged(inner_RF, self.down, rows_E)


def _ragged(x_RI: jax.Array, weight: nnx.Param, rows_E: jax.Array) -> jax.Array:
    held: Held | None = weight.get_metadata().get("held")
    if held is None:
        return jax.lax.ragged_dot(x_RI, mapped_like(rows_E, weight[...]), rows_E)
    return ragged_product(x_RI, held.weight, rows_E)


class UnlimitedMoe(Moe, PositionWise):
    """A `Moe` whose experts take all tokens that choose them, on the devices that hold
    their weights."""


def unlimited(spec: ModuleSpec) -> ModuleSpec:
    """Return the module with experts that drop no token; its parameters are cut as
    before."""
    return replace(without_capacity(spec), cls=UnlimitedMoe) if _limits(spec) else spec


def without_capacity(spec: ModuleSpec) -> ModuleSpec:
    """Return the module with the same parameters, and experts that drop no token."""
    if not _limits(spec):
        return spec
    config: MoeConfig = spec.config  # pyright: ignore[reportAssignmentType]
    routing = replace(config.routing, capacity_factor=None)
    return replace(spec, cls=DroplessMoe, config=replace(config, routing=routing))


def _limits(spec: ModuleSpec) -> bool:
    return spec.cls is Moe
