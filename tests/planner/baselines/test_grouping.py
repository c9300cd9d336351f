# SPDX-License-Identifier: Apache-2.0
"""AutoHet's grouping against enumerating every way to form groups."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.planner.baselines.autohet import (
    Mixes,
    balanced_groups,
    effective_power,
    mixes,
)

Mix = tuple[int, ...]


def ways(
    there: list[Mix], units: Mix, num_groups: int, start: int = 0
) -> Iterator[list[Mix]]:
    """Yield every choice of groups within the units, each once."""
    if not num_groups:
        yield []
        return
    for n in range(start, len(there)):
        left = tuple(a - b for a, b in zip(units, there[n], strict=True))
        if min(left) >= 0:
            for rest in ways(there, left, num_groups - 1, n):
                yield [there[n], *rest]


def power(mix: Mix, each: list[float], num_microbatches: int) -> float:
    bubble = num_microbatches / (num_microbatches + sum(mix) - 1)
    return bubble * sum(n * g for n, g in zip(mix, each, strict=True))


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.lists(st.floats(1.0, 9.0), min_size=3, max_size=3),
    st.integers(1, 3),
    st.integers(1, 8),
    st.integers(1, 3),
)
def test_the_weakest_group_is_as_strong_as_can_be(
    units: list[int],
    each: list[float],
    num_groups: int,
    num_microbatches: int,
    least_units: int,
) -> None:
    each = each[: len(units)]
    there = [tuple(row) for row in mixes(units, 6).tolist() if sum(row) >= least_units]
    found = None
    if there:
        units_NC = np.array(there)
        power_N = effective_power(units_NC, np.array(each), num_microbatches)
        found = balanced_groups(
            Mixes(units_NC=units_NC, power_N=power_N), units, num_groups
        )
    weakest = [
        min(power(mix, each, num_microbatches) for mix in way)
        for way in ways(there, tuple(units), num_groups)
    ]
    assert (found is None) == (not weakest)
    if found is not None:
        assert found.least_power == pytest.approx(max(weakest))
        assert sum(num for _, num in found.groups) == num_groups
        used = np.sum([num * np.array(mix) for mix, num in found.groups], axis=0)
        assert (used <= units).all()


def test_every_mix_is_there_once() -> None:
    found = [tuple(row) for row in mixes([2, 3], 4).tolist()]
    expected = {(a, b) for a in range(3) for b in range(4) if 1 <= a + b <= 4}
    assert sorted(found) == sorted(expected)


def test_many_classes_give_few_mixes() -> None:
    for num_classes in (3, 6, 12, 40):
        found = mixes([16] * num_classes, 16)
        assert 40 <= len(found) <= 3000
        assert (found.sum(axis=1) > 0).all()
