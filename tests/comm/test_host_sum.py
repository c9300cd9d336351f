# SPDX-License-Identifier: Apache-2.0
"""Sums by threads, against NumPy's sums of whole arrays."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.comm import host_sum
from hetjax.comm.host_sum import added, joined, rounded

LONG = host_sum._ALONE  # threads share longer work
SIZES = st.one_of(st.integers(0, 5), st.integers(LONG, LONG + 3 * host_sum._BLOCK))
WIRES = st.sampled_from([np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)])


@pytest.fixture(autouse=True)
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_sum, "num_cores", lambda: 3)


@settings(max_examples=12)
@given(SIZES, st.lists(WIRES, min_size=1, max_size=4), st.booleans(), st.integers(0, 9))
def test_a_sum_has_the_bits_of_one_thread_also_where_it_takes_a_parts_place(
    size: int, wires: list[np.dtype], in_place: bool, seed: int
):
    rng = np.random.default_rng(seed)
    parts = [(rng.standard_normal(size) * 1e3).astype(wire) for wire in wires]
    expected = parts[0].astype(np.float32)
    for part in parts[1:]:
        expected = expected + part.astype(np.float32)
    own = [part for part in parts[:2] if part.dtype == np.float32]
    kept = [part.copy() for part in parts]
    out = own[-1] if in_place and len(own) == len(parts[:2]) else None
    found = added(parts, out)
    assert found is out or out is None
    np.testing.assert_array_equal(found, expected)
    for part, before in zip(parts, kept, strict=True):
        assert part is out or part.tobytes() == before.tobytes()


def test_rounding_and_joining_are_numpys():
    values = np.random.default_rng(0).standard_normal(LONG + 7).astype(np.float32)
    values[:3] = np.nan, np.inf, -np.inf
    wire = np.dtype(ml_dtypes.bfloat16)
    found = rounded(values, wire)
    assert found.tobytes() == values.astype(wire).tobytes()
    assert rounded(values, values.dtype) is values
    parts = np.array_split(found, 3)
    np.testing.assert_array_equal(joined(parts), found.astype(np.float32))
