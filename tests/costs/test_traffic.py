# SPDX-License-Identifier: Apache-2.0
"""The arrays that a GPU's kernels move, against what they must read and write.

Legend: S stack, N rows, D width, F inner width.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from hetjax.costs.graph.traffic import moving_kernels
from hetjax.costs.graph.values import Cuts, Dims
from tests.costs.small_models import traced

CUTS = Cuts(dims=Dims(), cut=frozenset(), tensor=1)
N, D, F = 64, 32, 48


def moved(function: Callable[..., object], *shapes: tuple[int, ...]) -> list[int]:
    """Return the numbers of elements that each kernel reads and writes."""
    return [
        sum(CUTS.num_bytes(v) for v in (*kernel.reads, *kernel.step.outputs)) // 4
        for kernel in moving_kernels(traced(function, *shapes))
    ]


def test_elementwise_operations_read_their_inputs_and_write_their_output_once():
    assert moved(lambda x, y: jnp.exp(x + y) * 2.0, (N, D), (N, D)) == [3 * N * D]


@pytest.mark.parametrize("normalized", [jax.nn.softmax, jax.nn.standardize])
def test_normalized_rows_are_read_and_written_once(
    normalized: Callable[[jax.Array], jax.Array],
):
    assert moved(normalized, (N, D)) == [2 * N * D]


def test_what_two_products_read_is_written_once():
    def gated(x_ND: jax.Array, w_DF: jax.Array, v_DF: jax.Array) -> jax.Array:
        y_ND = jnp.exp(x_ND)
        return (y_ND @ w_DF) * (y_ND @ v_DF)

    product = N * D + D * F + N * F
    found = moved(gated, (N, D), (D, F), (D, F))
    assert found == [2 * N * D, product, product, 3 * N * F]


def test_of_a_sliced_stack_only_the_slice_is_read():
    def slice_of(stack_SND: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(stack_SND, 3, 1) * 2.0

    assert moved(slice_of, (8, N, D)) == [2 * N * D]


def test_of_an_array_that_is_updated_in_place_only_the_update_is_written():
    def updated(stack_SND: jax.Array, x_ND: jax.Array) -> jax.Array:
        new_ND = x_ND * 2.0
        return jax.lax.dynamic_update_slice_in_dim(stack_SND, new_ND[None], 3, 0)

    assert moved(updated, (8, N, D), (N, D)) == [2 * N * D]


def test_an_updated_array_is_read_whole_by_a_product():
    def updated(stack_ND: jax.Array, x_1D: jax.Array, w_DF: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(stack_ND, x_1D, 3, 0) @ w_DF

    found = moved(updated, (N, D), (1, D), (D, F))
    assert found == [2 * D, N * D + D * F + N * F]
