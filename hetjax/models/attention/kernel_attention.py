# SPDX-License-Identifier: Apache-2.0
"""Attention by a device-specific kernel, with the kernel's own derivative.

Legend: B sequences, L positions, N query heads, K key/value heads, H head size.
Owns what is kept for the backward pass: queries, keys, values, output and one number
per row, with the names of the chunked form. Owns the cut of heads over a stage's mesh,
too: a compiler cannot cut a kernel, so each device runs it on its own heads. Both
passes are named calls (`FORWARD`, `BACKWARD`): `costs/` finds them in traced programs
by name. Does not own the kernels (`cudnn_kernel.py`, `splash_kernel.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, get_abstract_mesh

from hetjax.models.attention.chunked_attention import ALL_BEFORE, KEPT, Visibility

KernelName = Literal["cudnn", "splash"]
FORWARD, BACKWARD = "attention_forward", "attention_backward"

_HEADS = PartitionSpec(None, None, "tensor")  # of BLNH
_ROWS = PartitionSpec(None, "tensor")  # of BNL
_WHOLE = PartitionSpec()  # of documents


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A kernel, and which keys its queries score."""

    name: KernelName
    visibility: Visibility

    def passes(self, name: str) -> Callable[..., Any]:
        """Return the forward or backward, imported on first use: other devices do not
        need its libraries."""
        module = import_module(f"hetjax.models.attention.{self.name}_kernel")
        return partial(getattr(module, name), self.visibility)


def kernel_attention(
    q_BLNH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    *,
    kernel: KernelName,
    visibility: Visibility = ALL_BEFORE,
    documents_BL: jax.Array | None = None,
) -> jax.Array:
    """Return z_BLNH as `chunked_attention` does, on the context's mesh if any."""
    given = q_BLNH, k_BLKH, v_BLKH, documents_BL
    return _attention(_Kernel(kernel, visibility), *given)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(kernel: _Kernel, *given: Any) -> jax.Array:
    return _forward(kernel, *given)[0]


def _forward(kernel: _Kernel, *given: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    given_specs = _HEADS, _HEADS, _HEADS, _WHOLE

    def attention_forward(*given: Any) -> tuple[jax.Array, jax.Array]:
        own_heads = _on_own_heads(
            kernel.passes("forward"), given_specs, (_HEADS, _ROWS)
        )
        return own_heads(*given)

    assert attention_forward.__name__ == FORWARD
    z_BLNH, log_total_BNL = jax.jit(attention_forward)(*given)
    z_BLNH = checkpoint_name(z_BLNH, KEPT)
    log_total_BNL = checkpoint_name(log_total_BNL, KEPT)
    return z_BLNH, (*given, z_BLNH, log_total_BNL)


def _backward(
    kernel: _Kernel, saved: tuple[Any, ...], dz_BLNH: jax.Array
) -> tuple[jax.Array | None, ...]:
    given_specs = _HEADS, _HEADS, _HEADS, _WHOLE, _HEADS, _ROWS, _HEADS

    def attention_backward(*given: Any) -> tuple[jax.Array, ...]:
        own_heads = _on_own_heads(kernel.passes("backward"), given_specs, (_HEADS,) * 3)
        return own_heads(*given)

    assert attention_backward.__name__ == BACKWARD
    return *jax.jit(attention_backward)(*saved, dz_BLNH), None


_attention.defvjp(_forward, _backward)


def _on_own_heads(
    kernel: Callable[..., Any], given: tuple[Any, ...], made: tuple[Any, ...]
) -> Callable[..., Any]:
    """Return the kernel, run by each device of the context's mesh on its own heads."""
    if get_abstract_mesh().empty:
        return kernel
    # the types of a kernel's outputs do not say along which axes they vary
    return jax.shard_map(kernel, in_specs=given, out_specs=made, check_vma=False)
