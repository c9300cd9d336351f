# SPDX-License-Identifier: Apache-2.0
"""The solver of the planner's linear and integer programs: HiGHS, which says nothing.

Owns that it is this one, and its silence. Does not own the programs.
"""

from contextlib import suppress
from functools import cache
from typing import Any

import cvxpy as cp
import highspy


def solve(problem: cp.Problem, **options: Any) -> None:
    """Solve it; the problem then has its status and values.

    Never from the solution of a solve before: which of several optima is found would
    depend on what else this process has planned.
    """
    _silence()
    problem.solve(solver=cp.HIGHS, warm_start=False, **options)


@cache
def _silence() -> None:
    """Let HiGHS print its banner where nobody sees it.

    It does so once in a process, when its first object is first used: by version 1.16
    as soon as a `Highs` is made, before that can be switched off. The class beneath
    says nothing until it is given a model. A release made otherwise may say it as
    before.
    """
    with suppress(AttributeError, TypeError):
        first = highspy.Highs.__bases__[0]()
        first.setOptionValue("log_to_console", False)
        first.passModel(highspy.HighsModel())
