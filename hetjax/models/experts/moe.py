# SPDX-License-Identifier: Apache-2.0
"""Top-k routed SwiGLU experts (Mixtral, arXiv 2401.04088) in place of an MLP.

Legend: B sequences, L positions, D residual width, F inner width, E experts,
C capacity (tokens of one sequence that one expert takes), k choices of a token.

Each sequence is routed on its own: the cut of a batch into microbatches or over a mesh
never changes the result. Within a sequence earlier tokens go first, so only earlier
tokens cause the drop of a token over capacity (which keeps only its residual): routing
is causal.

Owns routing, capacity, the experts and their balance loss. Does not own how experts
spread over devices: their leading dim is `experts`, and the one contraction over it
is the combine einsum, an all-reduce when the dim is sharded.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.models.configs import Routing, require_positive
from hetjax.models.layers import MlpConfig, Norm, activated, expert_weights, normal
from hetjax.models.linear.adapters import linear
from hetjax.models.model import AuxLoss


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig(MlpConfig):
    """Widths of the experts, and the routing of tokens."""

    routing: Routing

    def __post_init__(self) -> None:
        require_positive("moe", self)


class Moe(nnx.Module):
    """Map x to x + the gated sum of its top-k experts of norm(x).

    The auxiliary loss is the sequence-wise balance loss of DeepSeek-V3
    (arXiv 2412.19437, eq. 17-20) times the number of tokens: per sequence,
    coefficient * L * E * sum_e f_e P_e, with f_e the share of the sequence's top-k
    assignments that go to e (dropped ones included) and P_e the mean router
    probability of e. Padding (document 0) counts in none of L, f_e and P_e. The
    batch-wise form is not linear in the sequences, so it would depend on the
    microbatching; this form does not.
    """

    def __init__(self, config: MoeConfig, *, rngs: nnx.Rngs) -> None:
        D, F, E = config.hidden_size, config.inner_size, config.routing.num_experts
        self.config = config
        self.norm = Norm(config.norm, D)
        self.router = normal(rngs, (D, E), (None, None))
        cut = ("experts", None, None)
        self.gate = expert_weights(rngs, (E, D, F), cut)
        self.up = expert_weights(rngs, (E, D, F), cut)
        self.down = expert_weights(rngs, (E, F, D), cut, config.output_std)
        self.balance_loss = AuxLoss(jnp.zeros((), jnp.float32))

    def __call__(
        self, x_BLD: jax.Array, documents_BL: jax.Array | None = None
    ) -> jax.Array:
        y_BLD = self.norm(x_BLD)
        to = routed(self.config.routing, self.router[...], y_BLD, documents_BL)
        self.balance_loss[...] = to.balance_loss
        dispatch_BLEC, combine_BLEC = self._routes(
            to.expert_BLk,
            _slots(to.expert_BLk, to.chosen_BLE),
            to.weight_BLk.astype(x_BLD.dtype),
        )
        in_EBCD = jnp.einsum("blec,bld->ebcd", dispatch_BLEC, y_BLD)
        out_EBCD = self._experts(in_EBCD)
        return x_BLD + jnp.einsum("blec,ebcd->bld", combine_BLEC, out_EBCD)

    def _routes(
        self, expert_BLk: jax.Array, slot_BLk: jax.Array, gate_BLk: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return where each token goes, and with which weight its output returns.

        Dim E is made anew here, from indices: a cut over experts thus reaches neither
        the router nor the slots, which stay free of communication.
        """
        routing, dtype = self.config.routing, gate_BLk.dtype
        capacity = routing.capacity(expert_BLk.shape[1])
        to_BLkE = jax.nn.one_hot(expert_BLk, routing.num_experts, dtype=dtype)
        to_BLkC = jax.nn.one_hot(slot_BLk, capacity, dtype=dtype)  # 0 past the last
        return _outer(to_BLkE, to_BLkC), _outer(gate_BLk[..., None] * to_BLkE, to_BLkC)

    def _experts(self, x_EBCD: jax.Array) -> jax.Array:
        gate_EBCF = linear("ebcd,edf->ebcf", x_EBCD, self.gate)
        up_EBCF = linear("ebcd,edf->ebcf", x_EBCD, self.up)
        inner_EBCF = activated(gate_EBCF, self.config.activation) * up_EBCF
        return linear("ebcf,efd->ebcd", inner_EBCF, self.down)


def _outer(a_BLkE: jax.Array, b_BLkC: jax.Array) -> jax.Array:
    return jnp.sum(a_BLkE[..., None] * b_BLkC[..., None, :], axis=2)


@dataclass(frozen=True, slots=True)
class ExpertChoices:
    """The experts of each token, and the weights (fp32) of their outputs.

    `chosen_BLE` (int32) is 1 for the experts of a token, and 0 for others.
    """

    expert_BLk: jax.Array
    weight_BLk: jax.Array
    chosen_BLE: jax.Array
    balance_loss: jax.Array


def routed(
    routing: Routing,
    router_DE: jax.Array,
    y_BLD: jax.Array,
    documents_BL: jax.Array | None = None,
) -> ExpertChoices:
    """Route each token to its top-k experts; the docstring of `Moe` has the loss."""
    logits_BLE = jnp.einsum(
        "bld,de->ble", y_BLD, router_DE, preferred_element_type=jnp.float32
    )
    # Not lax.top_k: on a mesh with a tensor axis, too, XLA gathers its operand over the
    # data axis, and data ranks wait for each other in every layer.
    order_BLE = jnp.argsort(logits_BLE, axis=-1, descending=True, stable=True)
    expert_BLk = order_BLE[..., : routing.top_k]
    score_BLk = jnp.take_along_axis(logits_BLE, expert_BLk, axis=-1)
    chosen_BLE = _chosen(expert_BLk, routing.num_experts)
    return ExpertChoices(
        expert_BLk=expert_BLk,
        weight_BLk=_weights(routing, logits_BLE, score_BLk),
        chosen_BLE=chosen_BLE,
        balance_loss=_balance_loss(logits_BLE, chosen_BLE, routing, documents_BL),
    )


def _weights(
    routing: Routing, logits_BLE: jax.Array, score_BLk: jax.Array
) -> jax.Array:
    """Return the weight of each choice: its share of the chosen, or of all experts."""
    if routing.normalized:
        return jax.nn.softmax(score_BLk, axis=-1)
    total_BL1 = jax.nn.logsumexp(logits_BLE, axis=-1, keepdims=True)
    return jnp.exp(score_BLk - total_BL1)


def _chosen(expert_BLk: jax.Array, num_experts: int) -> jax.Array:
    """Count each token's assignments to each expert (0 or 1, int32)."""
    return jnp.sum(jax.nn.one_hot(expert_BLk, num_experts, dtype=jnp.int32), axis=2)


def _slots(expert_BLk: jax.Array, chosen_BLE: jax.Array) -> jax.Array:
    """Number the tokens of each expert from 0, in order of position."""
    before_BLE = jnp.cumsum(chosen_BLE, axis=1) - chosen_BLE
    return jnp.take_along_axis(before_BLE, expert_BLk, axis=-1)


def _balance_loss(
    logits_BLE: jax.Array,
    chosen_BLE: jax.Array,
    routing: Routing,
    documents_BL: jax.Array | None,
) -> jax.Array:
    assigned_BLE = chosen_BLE.astype(jnp.float32)
    probability_BLE = jax.nn.softmax(logits_BLE, axis=-1)
    num_positions, num_experts = logits_BLE.shape[1:]
    scale = routing.balance_coefficient * num_experts
    if documents_BL is None:
        share_BE = jnp.mean(assigned_BLE, axis=1) / routing.top_k
        probability_BE = jnp.mean(probability_BLE, axis=1)
        return scale * num_positions * jnp.sum(share_BE * probability_BE)
    counts_BL1 = (documents_BL > 0).astype(jnp.float32)[..., None]
    num_tokens_B1 = jnp.maximum(jnp.sum(counts_BL1, axis=1), 1)
    assigned_BE = jnp.sum(assigned_BLE * counts_BL1, axis=1) / routing.top_k
    probability_BE = jnp.sum(probability_BLE * counts_BL1, axis=1)
    return scale * jnp.sum(assigned_BE * probability_BE / num_tokens_B1)
