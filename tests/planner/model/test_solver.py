# SPDX-License-Identifier: Apache-2.0
"""A program's solution does not depend on what was solved before."""

import cvxpy as cp
import numpy as np
import pytest

from hetjax.planner.model.solver import solve

OPTIMA = {(1.0, 0.0): (1.0, 0.0), (0.0, 1.0): (0.0, 1.0)}


@pytest.mark.parametrize("before", [*OPTIMA, (1.0, 1.0)])
def test_of_several_optima_always_the_same_is_found(before: tuple[float, float]):
    x_2, worth_2 = cp.Variable(2, nonneg=True), cp.Parameter(2, nonneg=True)
    program = cp.Problem(cp.Maximize(worth_2 @ x_2), [np.ones(2) @ x_2 <= 1])
    found: list[tuple[float, ...]] = []
    for value in ((1.0, 1.0), before, (1.0, 1.0)):  # at first all shares tie
        worth_2.value = np.array(value)
        solve(program)
        assert x_2.value is not None
        found.append(tuple(x_2.value.tolist()))
    assert found[0] == found[2] and sum(found[0]) == pytest.approx(1.0)
    assert found[1] == pytest.approx(OPTIMA.get(before, found[0]))
