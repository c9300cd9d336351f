# SPDX-License-Identifier: Apache-2.0
"""Computes how long a worker may take.

That is the table's limit, or a shorter one if an expected or an earlier duration is
known. Owns the rule, and the slow rates and least limits that it uses. Does not own the
table (`message.py`), nor predicting or measuring times (`runtime/control/`,
`rounds.py`).
"""

from collections.abc import Mapping
from typing import Any

from hetjax.runtime.rpc import schema
from hetjax.runtime.rpc.message import LIMITS, AnyRequest

WATCHDOG_FACTOR = 10.0  # times the expected time, after which a worker hangs
LEAST_S = 60.0  # even if less is expected: a machine may be starved
# The same while programs compile: the times so far may be those of programs from a
# cache, and a single program may be large.
LEAST_COMPILE_S = 600.0
SLOW_BYTES_PER_S = 20e6  # of the slowest disk or link that is still useful


def limit_s(
    what: type[AnyRequest] | str,
    predicted_s: float | None,
    longest_s: float | None,
    factor: float,
) -> float:
    """Return how long a worker may take for this kind of request, before it hangs.

    `predicted_s` is the expected time, `longest_s` the longest time so far; None if not
    known. If both are None, only the table counts. Callers predict a step only if it is
    the first of a plan; that step may also compile programs.
    """
    most_s = LIMITS[what].seconds
    known_s = [found for found in (predicted_s, longest_s) if found is not None]
    if not known_s:
        return most_s
    is_first = what is schema.Train and predicted_s is not None
    compiles = what is schema.Compile or is_first
    least_s = LEAST_COMPILE_S if compiles else LEAST_S
    return min(most_s, max(least_s, factor * max(known_s)))


def first_step_s(step_s: float, longest_s: Mapping[Any, float]) -> float | None:
    """Return how long the first step of a plan, which may compile, should take.

    None before anything was compiled.
    """
    compile_s = longest_s.get(schema.Compile)
    return None if compile_s is None else step_s + compile_s


def moving_s(num_bytes: float) -> float:
    """Return how long writing or sending so many bytes takes at a slow rate.

    >>> moving_s(100e6)
    5.0
    """
    return num_bytes / SLOW_BYTES_PER_S
