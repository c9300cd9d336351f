# SPDX-License-Identifier: Apache-2.0
"""Codes of 8 bits: always the nearest code, within a bound in closed form."""

import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.mesh.axes import master_spec
from hetjax.models.model import abstract_params
from hetjax.models.presets import model_preset
from hetjax.stage.eight_bits import decode, encode, row_dim

SIGNED = np.array([np.sign(c) * (abs(c) / 127) ** 4 for c in range(-127, 128)])
UNSIGNED = np.array([(c / 256) ** 4 for c in range(1, 257)])


def rows(signed: bool) -> np.ndarray:
    """Return rows of many sizes, also with an outlier, zeros, or very unlike values."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(40, 64)) * 10.0 ** rng.uniform(-6, 0, (40, 64))
    values *= 10.0 ** rng.uniform(-8, 4, (40, 1))
    values[3], values[4, 1:] = 0, 1e-12
    return (values if signed else np.square(values)).astype(np.float32)


@pytest.mark.parametrize("signed", [True, False])
def test_every_value_gets_the_nearest_code_of_its_row(signed: bool):
    values = rows(signed)
    codes, scales = encode(jnp.asarray(values), 1, signed=signed)
    assert codes.dtype == (jnp.int8 if signed else jnp.uint8)
    np.testing.assert_array_equal(scales, np.abs(values).max(1, keepdims=True))
    found = np.asarray(decode(codes, scales, signed=signed), np.float64)
    for row, decoded, scale in zip(values, found, np.asarray(scales), strict=True):
        table = (SIGNED if signed else UNSIGNED) * float(scale[0])
        nearest = np.abs(row[:, None].astype(np.float64) - table).min(1)
        error = np.abs(row - decoded)
        np.testing.assert_allclose(error, nearest, atol=2e-6 * float(scale[0]))


@pytest.mark.parametrize(("signed", "most"), [(True, 127), (False, 256)])
def test_an_error_is_at_most_half_the_step_between_codes(signed: bool, most: int):
    """The step between codes at y is at most 4 (y + 1/n)**3 / n, growing with y."""
    values = rows(signed)
    codes, scales = encode(jnp.asarray(values), 1, signed=signed)
    error = np.abs(values - np.asarray(decode(codes, scales, signed=signed)))
    scales = np.maximum(np.asarray(scales), np.finfo(np.float32).tiny)
    y = (np.abs(values) / scales) ** 0.25
    bound = 2 * (y + 1 / most) ** 3 / most + 1e-6
    assert np.all(error <= bound * scales)


def test_the_largest_of_a_row_is_exact_and_a_square_is_never_lost():
    values = rows(signed=False)
    codes, scales = encode(jnp.asarray(values), 1, signed=False)
    found = np.asarray(decode(codes, scales, signed=False))
    np.testing.assert_array_equal(found.max(1), values.max(1))
    assert np.all((found > 0) == (values.max(1, keepdims=True) > 0))


@pytest.mark.parametrize("name", ["tiny", "gpt2-124m", "llama3-8b", "mixtral-8x7b"])
def test_no_stage_cuts_a_row(name: str):
    for spec in model_preset(name).modules:
        for param in abstract_params(spec).values():
            if (dim := row_dim(param)) is None:
                continue
            for data, tensor in ((1, 2), (2, 1), (2, 2), (8, 1), (4, 2)):
                layout = master_spec(
                    param.shape, param.logical, data=data, tensor=tensor
                )
                cut = (*layout, *(None,) * len(param.shape))
                assert cut[dim] is None, (spec.path, param)
