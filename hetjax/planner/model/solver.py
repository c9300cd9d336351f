# SPDX-License-Identifier: Apache-2.0
"""Solves the planner's linear and integer programs with HiGHS, without output.

Owns the choice of the solver and its silence. Does not own the programs.
"""

from contextlib import suppress
from functools import cache
from typing import Any

import cvxpy as cp
import highspy


def solve(problem: cp.Problem, **options: Any) -> None:
    """Solve the problem in place: it then has its status and values.

    Never starts from an earlier solution. Otherwise, which of several optima is found
    would depend on what else this process has planned.
    """
    _silence()
    problem.solve(solver=cp.HIGHS, warm_start=False, **options)


@cache
def _silence() -> None:
    """Make HiGHS print its banner while its console output is off.

    HiGHS prints the banner once per process, on first use. Version 1.16 prints it as
    soon as a `Highs` is made, before output can be switched off. The base class prints
    nothing until it gets a model. With a release built differently, the banner may
    still appear.
    """
    with suppress(AttributeError, TypeError):
        first = highspy.Highs.__bases__[0]()
        first.setOptionValue("log_to_console", False)
        first.passModel(highspy.HighsModel())
