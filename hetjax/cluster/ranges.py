# SPDX-License-Identifier: Apache-2.0
"""What numbers in files may be, so that what follows from them is finite, and in time.

Owns the ranges of numbers in cluster, plan and profile files, generous ones. Does not
own what must hold between numbers (`cluster.py`, `plans/validation.py`).
"""

from typing import NamedTuple


class Range(NamedTuple):
    """Numbers from `least` to `most`, both included."""

    least: float
    most: float

    def has(self, value: float) -> bool:
        """Whether it is one of them; what is no number is not."""
        return self.least <= value <= self.most

    def nearest(self, value: float) -> float:
        """Return the number of the range that is nearest."""
        return min(max(value, self.least), self.most)

    def allowed(self, name: str) -> str:
        """The range in words.

        >>> Range(0, 1e6).allowed("price_per_hour")
        '0 <= price_per_hour <= 1e+06'
        """
        return f"{_shown(self.least)} <= {name} <= {_shown(self.most)}"


RATE = Range(1e-6, 1e9)  # of tera, giga and gibi: a millionth of what there is, or more
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
SECONDS = Range(0, 1e6)  # of anything that was measured
BYTES = Range(0, 2**53)
MOST_FORWARDS = 2**20  # of a step, over all stages: more are not simulated in a minute


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
