# SPDX-License-Identifier: Apache-2.0
"""Bytes that were sent, by link and by what they are.

Counted where they are sent, without headers and signs of life: what costs charge for
messages and sums is held against this. Does not own what kinds there are (`wire.py`).
"""

import threading
from collections import Counter
from collections.abc import Hashable


class Tally:
    """Counts from any thread; kinds are the third number of a message's key.

    A link is what tells the ends: among workers the receiver, in one process both.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[tuple[Hashable, int]] = Counter()

    def add(self, link: Hashable, kind: int, num_bytes: int) -> None:
        with self._lock:
            self._bytes[link, kind] += num_bytes

    def by_link_and_kind(self) -> dict[tuple[Hashable, int], int]:
        """All that was counted so far."""
        with self._lock:
            return dict(self._bytes)
