# SPDX-License-Identifier: Apache-2.0
"""Weights in few bits: brute force, closed forms and the paper's construction."""

import math
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from hetjax.models.configs import FrozenForm
from hetjax.models.linear import quantised as quantised_module
from hetjax.models.linear.quantised import (
    NF4,
    product,
    quantised,
    ragged_product,
    rounded,
    whole,
)

FORMULAS = {1: "bld,dnh->blnh", 2: "blnh,nhd->bld"}
SHAPES = [((128, 3, 5), 1), ((3, 192, 5), 2), ((48, 2, 2), 1), ((2, 4, 6), 2)]


def random_weight(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    value = rng.standard_t(3, shape) * rng.uniform(0.01, 10, shape[-1])
    return value.astype(np.float32)


def brute_force(form: FrozenForm, weight: np.ndarray, num_inputs: int) -> np.ndarray:
    """Return each number as the nearest value that its block can encode."""
    dim = num_inputs - 1
    rows = np.moveaxis(weight.astype(np.float64), dim, -1)
    size = next(n for n in (64, 32, 16, 8, 4, 2, 1) if rows.shape[-1] % n == 0)
    blocks = rows.reshape(-1, size, 1)
    steps = np.arange(-127, 128) / 127 if form == "int8" else np.array(NF4)
    values = np.abs(blocks).max(axis=1, keepdims=True) * steps
    nearest = np.argmin(np.abs(values - blocks), axis=2)
    found = np.take_along_axis(values[:, 0], nearest, axis=1)
    return np.moveaxis(found.reshape(rows.shape), -1, dim)


@pytest.mark.parametrize("form", ["int8", "nf4"])
@pytest.mark.parametrize(("shape", "num_inputs"), SHAPES)
def test_each_number_becomes_the_nearest_of_those_that_its_block_has(
    form: FrozenForm, shape: tuple[int, ...], num_inputs: int
):
    weight = random_weight(shape)
    expected = brute_force(form, weight, num_inputs)
    found = rounded(form, weight, num_inputs)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", ["int8", "nf4"])
@pytest.mark.parametrize(("shape", "num_inputs"), SHAPES)
def test_weights_are_rounded_some_blocks_at_a_time(
    form: FrozenForm,
    shape: tuple[int, ...],
    num_inputs: int,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(quantised_module, "_ROUNDED_AT_ONCE", 70)
    sizes: list[int] = []
    bring = quantised_module._quantiser

    def told(form: FrozenForm, num_inputs: int) -> Any:
        quantise = bring(form, num_inputs)
        return lambda blocks: sizes.append(blocks.size) or quantise(blocks)

    monkeypatch.setattr(quantised_module, "_quantiser", told)
    weight = random_weight(shape)
    expected = brute_force(form, weight, num_inputs)
    found = rounded(form, weight, num_inputs)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=0)
    assert sum(sizes) == weight.size
    row = math.gcd(64, shape[num_inputs - 1]) * math.prod(shape[num_inputs:])
    assert max(sizes) <= max(70, row)


def test_int8_is_off_by_half_a_step_and_nf4_by_half_its_widest_gap_at_most():
    weight = random_weight((256, 7))
    largest = np.abs(weight.reshape(4, 64, 7)).max(axis=1, keepdims=True)
    bounds: dict[FrozenForm, float] = {
        "int8": 0.5 / 127,
        "nf4": np.diff(NF4).max() / 2,
    }
    for form, bound in bounds.items():
        off = np.abs(rounded(form, weight, 1) - weight).reshape(4, 64, 7)
        assert (off <= bound * largest * (1 + 1e-5)).all()
        assert off.max() > 0.8 * bound * largest.min()


def test_the_16_numbers_are_the_quantiles_that_the_paper_says():
    positive = norm.ppf(np.linspace(0.9677083, 0.5, 9)[:-1])
    negative = -norm.ppf(np.linspace(0.9677083, 0.5, 8)[:-1])
    values = np.sort(np.concatenate([positive, [0], negative]))
    np.testing.assert_allclose(NF4, values / np.abs(values).max(), atol=2e-7)


def test_codes_take_a_byte_or_half_of_one_and_scales_four_for_64():
    weight = jnp.asarray(random_weight((3, 192, 5)))
    sizes: dict[FrozenForm, int] = {"int8": weight.size, "nf4": weight.size // 2}
    for form, codes_bytes in sizes.items():
        held = quantised(form, weight, 2)
        assert held.codes.nbytes == codes_bytes
        assert held.scales.nbytes == weight.size // 64 * 4


def test_zeros_stay_zeros():
    weight = np.zeros((128, 2), np.float32)
    weight[:64, 1] = 1.0
    for form in get_args(FrozenForm):
        np.testing.assert_array_equal(rounded(form, weight, 1), weight)


@pytest.mark.parametrize("form", ["int8", "nf4"])
@pytest.mark.parametrize("num_inputs", [1, 2])
def test_a_product_and_its_gradient_are_those_of_the_weight_made_whole(
    form: FrozenForm, num_inputs: int
):
    formula = FORMULAS[num_inputs]
    weight = random_weight((64, 4, 6) if num_inputs == 1 else (4, 64, 6))
    rng = np.random.default_rng(1)
    shapes = {1: ((2, 3, 64), (2, 3, 4, 6)), 2: ((2, 3, 4, 64), (2, 3, 6))}
    x, dy = (rng.standard_normal(s).astype(np.float32) for s in shapes[num_inputs])
    held = quantised(form, jnp.asarray(weight), num_inputs)
    y: Any
    y, vjp = jax.vjp(lambda x: product(formula, x, held), jnp.asarray(x))
    kept = brute_force(form, weight, num_inputs)
    num_free = 3 - num_inputs
    expected = np.tensordot(x, kept, axes=num_inputs)
    of_outputs = [*range(num_inputs, 3)]
    dx = np.tensordot(dy, kept, axes=([*range(2, 2 + num_free)], of_outputs))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(vjp(jnp.asarray(dy))[0], dx, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_a_ragged_product_and_its_gradient_are_those_of_each_row_with_its_expert(
    form: FrozenForm,
):
    weight, rows = random_weight((3, 64, 6)), [4, 0, 5]
    rng = np.random.default_rng(1)
    x, dy = (rng.standard_normal((9, n)).astype(np.float32) for n in (64, 6))
    held = quantised(form, jnp.asarray(weight), 2)
    kept = brute_force(form, weight, 2)[np.repeat(np.arange(3), rows)]
    y, vjp = jax.vjp(
        lambda x: ragged_product(x, held, jnp.asarray(rows)), jnp.asarray(x)
    )
    expected, dx = np.einsum("ri,rio->ro", x, kept), np.einsum("ro,rio->ri", dy, kept)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(vjp(jnp.asarray(dy))[0], dx, rtol=1e-4, atol=1e-4)
    still = sum(leaf.nbytes for leaf in jax.tree.leaves(vjp))
    assert still <= held.codes.nbytes + held.scales.nbytes + 4 * len(rows)


@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_the_backward_keeps_codes_and_not_the_weight(form: FrozenForm):
    held = quantised(form, jnp.asarray(random_weight((128, 4, 8))), 1)

    def given(x: jax.Array, held: Any) -> jax.Array:
        y: Any = product(FORMULAS[1], x, held)
        return y

    x = jnp.ones((1, 2, 128))
    _, vjp = jax.vjp(lambda x: given(x, held), x)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(vjp))
    assert kept <= held.codes.nbytes + held.scales.nbytes
    assert whole(held, 1, jnp.bfloat16).dtype == jnp.bfloat16
