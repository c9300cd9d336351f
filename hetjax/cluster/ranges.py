# SPDX-License-Identifier: Apache-2.0
"""Limits numbers in files, so that results are finite and computed in time.

Owns the ranges of numbers in cluster, plan and profile files, which are generous. Does
not own conditions between numbers (`cluster.py`, `plans/validation.py`).
"""

from typing import NamedTuple


class Range(NamedTuple):
    """Numbers from `least` to `most`, both included."""

    least: float
    most: float

    def has(self, value: float) -> bool:
        """Return whether the value is in the range; False for NaN."""
        return self.least <= value <= self.most

    def nearest(self, value: float) -> float:
        """Return the nearest number in the range."""
        return min(max(value, self.least), self.most)

    def allowed(self, name: str) -> str:
        """Return the range in words.

        >>> Range(0, 1e6).allowed("price_per_hour")
        '0 <= price_per_hour <= 1e+06'
        """
        return f"{_shown(self.least)} <= {name} <= {_shown(self.most)}"


RATE = Range(1e-6, 1e9)  # in tera, giga or gibi: a millionth of one, or more
NODE = {
    "price_per_hour": Range(0, 1e6),
    "preemptions_per_hour": Range(0, 1e4),
    "peak_tflops": RATE,
    "memory_gib": RATE,
    "memory_gb_per_s": RATE,
    "intra_node_gb_per_s": RATE,
    "network_gbit_per_s": RATE,
}
LINK = {"bandwidth_gbit_per_s": RATE, "latency_ms": Range(0, 1e6)}
COUNT = Range(1, 2**16)  # of microbatches, devices, launch-ahead
SEQUENCES = Range(1, 2**31)  # of a batch
TOKENS = Range(1, 2**24)  # of a sequence
SECONDS = Range(0, 1e6)  # of any measurement
BYTES = Range(0, 2**53)
MOST_FORWARDS = 2**20  # of a step, over all stages: more take over a minute to simulate


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
