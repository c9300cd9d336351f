# SPDX-License-Identifier: Apache-2.0
"""Times and predicts causal attention's forward and backward, each as one program.

Legend: B sequences, L positions, N query heads, K key/value heads, H head size.
Owns the two programs and the figures that costs give for them. Does not own the forms
(`hetjax/models/attention/attention.py`) nor where each form runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from experiments.gpu.timing.calibrating import TimedProduct
from experiments.gpu.timing.clock import median_s
from hetjax.cluster.catalogue import DeviceSpec, Precision
from hetjax.costs.graph.values import Cuts, Dims, Origin, graph_of
from hetjax.costs.roofline import attention_products, graph_s, ring_hop
from hetjax.models.attention.attention import AttentionForm, attend
from hetjax.models.attention.kernel_attention import BACKWARD, FORWARD

PASSES = (FORWARD, BACKWARD)
_AT_ONCE = 4  # calls that are queued


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSizes:
    """The numbers of heads of a model, and their size."""

    num_heads: int
    num_kv_heads: int
    head_size: int


@dataclass(frozen=True, kw_only=True)
class AttentionPasses:
    """Attention of given sizes in a given form and precision."""

    sequences: int
    length: int
    heads: HeadSizes
    form: AttentionForm
    precision: Precision

    def timed(self, device: jax.Device) -> dict[str, TimedProduct]:
        """Time both passes on random values; RuntimeError if they do not run there."""
        with jax.numpy_dtype_promotion("standard"):  # JAX's own derivative promotes
            *qkv, dz = self._random(device)
            _, pull = jax.jit(self._kept)(*qkv)
            forward, backward = jax.jit(self._forward), jax.jit(_backward)
            calls = partial(forward, *qkv), partial(backward, pull, dz)
            times_s = [median_s(call, at_once=_AT_ONCE) for call in calls]
        return {
            name: self.product(name, seconds)
            for name, seconds in zip(PASSES, times_s, strict=True)
        }

    def product(self, name: str, seconds: float) -> TimedProduct:
        """Return a pass with this time and the arithmetic that costs count."""
        heads = self.sequences * self.heads.num_heads
        return TimedProduct(
            sizes=(heads, self.length, self.length, self.heads.head_size),
            seconds=seconds,
            number=attention_products(name, self.length),
        )

    def predicted(self, device: DeviceSpec) -> dict[str, TimedProduct]:
        """Return both passes with the seconds that costs count for them."""
        *qkv, dz = self._abstract
        with jax.numpy_dtype_promotion("standard"):
            _, pull = jax.eval_shape(self._kept, *qkv)
            forward_s = self._counted_s(device, self._forward, *qkv)
            backward_s = self._counted_s(device, _backward, pull, dz)
        return {
            FORWARD: self.product(FORWARD, forward_s),
            BACKWARD: self.product(BACKWARD, backward_s),
        }

    def _forward(self, q: Any, k: Any, v: Any) -> jax.Array:
        return attend(q, k, v, form=self.form)

    def _kept(self, q: Any, k: Any, v: Any) -> tuple[jax.Array, Any]:
        """Return the forward's result and the backward's residuals. Not timed: the
        program copies those residuals that were its inputs."""
        return jax.vjp(self._forward, q, k, v)

    def _counted_s(
        self, device: DeviceSpec, program: Callable[..., Any], *given: Any
    ) -> float:
        dims = Dims()
        inputs = [
            dims.value(leaf.shape, leaf.dtype, Origin.BATCH)
            for leaf in jax.tree.leaves(given)
        ]
        graph = graph_of(jax.make_jaxpr(program)(*given), inputs, dims)
        cuts = Cuts(dims=dims, cut=frozenset(), tensor=1)
        return graph_s(graph, cuts, device, self.precision, ring_hop(device))

    @cached_property
    def _abstract(self) -> list[jax.ShapeDtypeStruct]:
        """Queries, keys, values and the gradient of the output."""
        queries, keys = self.heads.num_heads, self.heads.num_kv_heads
        return [
            jax.ShapeDtypeStruct(
                (self.sequences, self.length, number, self.heads.head_size),
                jnp.dtype(self.precision),
            )
            for number in (queries, keys, keys, queries)
        ]

    def _random(self, device: jax.Device) -> list[jax.Array]:
        with jax.default_device(device):
            keys = jax.random.split(jax.random.key(0), len(self._abstract))
            drawn = [
                jax.random.normal(key, like.shape, like.dtype)
                for key, like in zip(keys, self._abstract, strict=True)
            ]
        return jax.device_put(drawn, device)


def _backward(pull: Any, dz: Any) -> Any:
    return pull(dz)
