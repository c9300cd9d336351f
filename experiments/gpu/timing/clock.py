# SPDX-License-Identifier: Apache-2.0
"""Measures the time of a program on a device: the median of warmed-up calls.

Owns when the clock is read. Does not own what is timed.
"""

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax

_LEAST, _MOST = 3, 200  # samples
_SAMPLES_S = 0.2  # time for samples beyond the least number
_LONG_S = 1.0  # a call this long needs only one sample
_QUEUE_S = 0.02  # the most time of queued calls
_LEAST_S = 1e-9  # in case the clock did not advance


def median_s(
    call: Callable[..., Any],
    prepare: Callable[[], tuple[Any, ...]] = tuple,
    *,
    at_once: int = 1,
) -> float:
    """Return the median seconds of a call; `prepare` makes its inputs off the clock.

    With `at_once` a sample is that many calls, all queued before the wait for the last.
    The device then runs one after the other, as it does within a step.
    """
    _once_s(call, prepare, 1)  # which may compile
    warm_s = _once_s(call, prepare, 1)
    least = _LEAST if warm_s < _LONG_S else 1
    at_once = min(at_once, math.ceil(_QUEUE_S / warm_s))
    times_s: list[float] = []
    end_s = time.perf_counter() + _SAMPLES_S
    while len(times_s) < least or (
        time.perf_counter() < end_s and len(times_s) < _MOST
    ):
        times_s.append(_once_s(call, prepare, at_once))
    return median(times_s)


def _once_s(
    call: Callable[..., Any], prepare: Callable[[], tuple[Any, ...]], at_once: int
) -> float:
    given = jax.block_until_ready(prepare())
    start_s, made = time.perf_counter(), None
    for _ in range(at_once):
        made = call(*given)
    jax.block_until_ready(made)
    return max(time.perf_counter() - start_s, _LEAST_S) / at_once
