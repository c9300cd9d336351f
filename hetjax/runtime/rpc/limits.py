# SPDX-License-Identifier: Apache-2.0
"""How long a worker may take: what the table allows, or less where more is known.

Owns the rule, and the slow rates and the least limits that it goes by. Does not own the
table (`message.py`), nor who predicts or measures how long something takes
(`runtime/control/`, `rounds.py`).
"""

from collections.abc import Mapping
from typing import Any

from hetjax.runtime.rpc import schema
from hetjax.runtime.rpc.message import LIMITS, AnyRequest

WATCHDOG_FACTOR = 10.0  # times as long as expected, and a worker hangs
LEAST_S = 60.0  # however quick it is expected to be: a machine may be starved
# A compiler that has found its programs in a cache says nothing of how long it takes
# where it has to make them; this is without any that is done, for it may be a large one
LEAST_COMPILE_S = 600.0
SLOW_BYTES_PER_S = 20e6  # of a disk, or of a link, that is still of use


def limit_s(
    what: type[AnyRequest] | str,
    predicted_s: float | None,
    longest_s: float | None,
    factor: float,
) -> float:
    """How long a worker may take for this kind of request, before it hangs.

    `predicted_s` is what it should take, `longest_s` what it took at most so far; what
    is not known is None. If neither is, the table alone says. Of steps the first of a
    plan alone is predicted, and may compile something, too.
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
    """How long the first step of a plan should take: it may compile some things, too.

    None before anything was compiled.
    """
    compile_s = longest_s.get(schema.Compile)
    return None if compile_s is None else step_s + compile_s


def moving_s(num_bytes: float) -> float:
    """How long it takes to write so many bytes, or to send them, where that is slow.

    >>> moving_s(100e6)
    5.0
    """
    return num_bytes / SLOW_BYTES_PER_S
