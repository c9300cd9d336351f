# SPDX-License-Identifier: Apache-2.0
"""The baselines' cuts, limits and shares against full enumeration."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.planner.baselines.stage_costs import shared_out
from hetjax.planner.model.cuts import balanced_cuts, best_limit, even_cuts, fastest_cuts


def all_cuts(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    inner = combinations(range(1, num_layers), num_stages - 1)
    return [(0, *bounds, num_layers) for bounds in inner]


def random_loads(seed: int, num_stages: int, num_layers: int) -> np.ndarray:
    """Return loads that grow with the range, with some ranges forbidden."""
    rng = np.random.default_rng(seed)
    each_SL = rng.integers(1, 9, (num_stages, num_layers)).astype(float)
    before_SJ = np.concatenate([0 * each_SL[:, :1], each_SL.cumsum(axis=1)], axis=1)
    load_SIJ = before_SJ[:, None, :] - before_SJ[:, :, None]
    longest = rng.integers(2, num_layers + 1, num_stages)
    first, end = np.indices(load_SIJ.shape[1:])
    allowed = (end > first) & (end - first <= longest[:, None, None])
    return np.where(allowed, load_SIJ, np.inf)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [
        (6, 1, (0, 6)),
        (6, 2, (0, 3, 6)),
        (6, 4, (0, 2, 3, 4, 6)),
        (26, 4, (0, 7, 13, 19, 26)),  # 24 blocks
        (12, 4, (0, 3, 6, 9, 12)),  # 10 blocks: inner stages take the remainder
        (13, 4, (0, 4, 7, 10, 13)),  # 11: then the first stage
    ],
)
def test_even_cuts_spread_blocks(
    num_layers: int, num_stages: int, expected: tuple[int, ...]
) -> None:
    assert even_cuts(num_layers, num_stages) == expected


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(4, 7))
def test_balanced_cuts_have_the_least_largest_load(
    seed: int, num_stages: int, num_layers: int
) -> None:
    load_SIJ = random_loads(seed, num_stages, num_layers)

    def largest(cuts: tuple[int, ...]) -> float:
        return max(load_SIJ[s, i, j] for s, (i, j) in enumerate(pairwise(cuts)))

    best = min(map(largest, all_cuts(num_layers, num_stages)))
    found = balanced_cuts(load_SIJ)
    assert (found is None) == np.isinf(best)
    assert found is None or largest(found) == best


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(4, 7), st.integers(1, 12))
def test_fastest_cuts_have_the_least_closed_form(
    seed: int, num_stages: int, num_layers: int, num_microbatches: int
) -> None:
    load_SIJ = random_loads(seed, num_stages, num_layers)

    def step_s(cuts: tuple[int, ...]) -> float:
        loads = [load_SIJ[s, i, j] for s, (i, j) in enumerate(pairwise(cuts))]
        if np.isinf(max(loads)):
            return np.inf
        return sum(loads) + (num_microbatches - 1) * max(loads)

    best = min(map(step_s, all_cuts(num_layers, num_stages)))
    found = fastest_cuts(load_SIJ, num_microbatches)
    assert (found is None) == np.isinf(best)
    assert found is None or step_s(found) == pytest.approx(best)


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=40, unique=True),
    st.lists(st.integers(0, 500), min_size=40, max_size=40),
    st.integers(0, 40),
)
def test_the_best_limit_is_that_of_trying_all(
    limits: list[int], drops: list[int], weight: int
) -> None:
    ascending = sorted(limits)
    fills = dict(zip(ascending, 20_000 - np.cumsum(drops), strict=False))
    found = best_limit(
        ascending, lambda limit: (float(fills[int(limit)]), limit), weight
    )
    assert found.total_s == min(fills[n] + weight * n for n in ascending)
    assert fills[int(found.solution)] + weight * found.solution == found.total_s


@pytest.mark.parametrize(
    ("total", "weights", "expected"),
    [
        (16, [100.0, 300.0], [4, 12]),
        (16, [312.0, 989.4], [4, 12]),  # 3.84, 12.16
        (10, [1.0, 1.0, 2.0], [3, 2, 5]),  # 2.5, 2.5, 5
        (5, [1.0, 100.0], [1, 4]),  # everyone gets at least one
        (3, [1.0, 1.0, 98.0], [1, 1, 1]),
    ],
)
def test_counts_are_in_proportion(
    total: int, weights: list[float], expected: list[int]
) -> None:
    assert shared_out(total, weights) == expected
