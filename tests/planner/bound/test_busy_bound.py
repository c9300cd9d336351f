# SPDX-License-Identifier: Apache-2.0
"""The least time of devices that never wait, against an independent linear program."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from scipy.optimize import linprog

from hetjax.planner.bound.busy_bound import busy_bound_s
from hetjax.planner.model.network_cuts import WorkLimit
from hetjax.planner.model.problem import Problem
from hetjax.planner.model.terms.split_terms import split_bound_problem
from tests.planner.wide_space import wide_request
from tests.short_runs import draws

SEEDS = range(12)


def problem_of(seed: int) -> Problem:
    request = wide_request(seed)
    return split_bound_problem(request, request.degrees)[0]


def least_s(
    p: Problem, most: float = inf, weight_OL: np.ndarray | None = None
) -> float:
    """Return the least step of a program with a variable for each layer and option, and
    one for the step. Layers are not merged by kind; seconds are by device."""
    _, num_options, L = p.layer_s_BOL.shape
    each_OL = (p.layer_s_BOL / np.array(p.microbatch_sizes)[:, None, None]).min(axis=0)
    upper = np.zeros((len(p.classes) + 1, num_options * L + 1))
    equal = np.zeros((L, num_options * L + 1))
    highest = []
    for o in range(num_options):
        for layer in range(L):
            n = o * L + layer
            fits = np.isfinite(each_OL[o, layer])
            highest.append(None if fits else 0)
            equal[layer, n] = 1
            if fits:
                upper[:-1, n] = each_OL[o, layer] * p.global_batch * p.used_OC[o]
            if weight_OL is not None:
                upper[-1, n] = weight_OL[o, layer] * p.global_batch
    upper[:-1, -1] = -p.devices_C
    found = linprog(
        [0] * (num_options * L) + [1],
        A_ub=upper,
        b_ub=[0] * len(p.classes) + [min(most, 1e9)],
        A_eq=equal,
        b_eq=[1] * L,
        bounds=[*((0, most) for most in highest), (0, None)],
    )
    return float(found.fun) if found.status == 0 else inf


@pytest.mark.parametrize("seed", draws(SEEDS, short=4))
def test_devices_that_never_wait_take_so_long(seed: int) -> None:
    p = problem_of(seed)
    assert busy_bound_s(p) == pytest.approx(least_s(p), rel=1e-4)


@pytest.mark.parametrize("seed", draws(SEEDS, short=4))
def test_a_limit_on_the_work_of_one_side_is_kept_to(seed: int) -> None:
    """Just below the bound, the step needs more work than the one side may do."""
    p = problem_of(seed)
    free_s = least_s(p)
    away_O = np.array([option.device_class == 0 for option in p.options])
    share_L = 1 / p.num_layers
    rows = p.range_IJ[np.arange(p.num_layers), np.arange(p.num_layers) + 1]
    weight_OU = np.zeros((len(p.options), p.busy_s_BOU.shape[2]))
    weight_OU[np.ix_(away_O, rows)] = share_L
    per_s = 0.3 * p.global_batch / free_s

    def most(step_s: float) -> float:
        return min(per_s * step_s, p.global_batch)

    limit = WorkLimit(weight_OU=weight_OU, most_sequences=most)
    found_s = busy_bound_s(replace(p, work_limit=limit), 100 * free_s)
    weight_OL = weight_OU[:, rows]
    below_s, above_s = 0.998 * found_s, min(1.003 * found_s, 100 * free_s)
    if found_s > free_s * 1.01:
        assert least_s(p, most(below_s), weight_OL) > below_s
    if found_s < 99 * free_s:
        assert least_s(p, most(above_s), weight_OL) <= above_s
