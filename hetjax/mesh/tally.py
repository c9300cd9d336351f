# SPDX-License-Identifier: Apache-2.0
"""Bytes that a worker has sent, by receiver and by what they are.

Counted where they are sent, without headers and signs of life: what costs charge for
messages and sums is held against this. Does not own what kinds there are (`wire.py`).
"""

import threading
from collections import Counter


class Tally:
    """Counts from any thread; kinds are the third number of a message's key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[tuple[str, int]] = Counter()

    def add(self, receiver: str, kind: int, num_bytes: int) -> None:
        with self._lock:
            self._bytes[receiver, kind] += num_bytes

    def by_receiver_and_kind(self) -> dict[tuple[str, int], int]:
        """All that was counted so far."""
        with self._lock:
            return dict(self._bytes)
