# SPDX-License-Identifier: Apache-2.0
"""Computes when messages on shared trunks arrive.

Owns the sharing. A channel carries its messages one after the other, in the order of
sending. A message holds all trunks of its channel's route at once. Messages on a trunk
share it equally, and a message moves at its share of its slowest trunk. It arrives a
latency after its last byte has left. This is our own model, close to the rates of
parallel TCP or NCCL streams; it never hands out more than a trunk's capacity.

Does not own the messages (`simulator.py`) nor routes and capacities (`costs/`).
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count

from hetjax.costs.costs import Route

Arrive = Callable[[float], None]  # called with the arrival time of a message


class Traffic:
    """The clock and the trunks of one simulation; `at` and `send` schedule events."""

    def __init__(self, trunks: Mapping[str, float], routes: Sequence[Route]) -> None:
        """Set `trunks` (in bytes per second) and channels: i uses `routes[i]`."""
        number = {name: index for index, name in enumerate(trunks)}
        self._capacity = list(trunks.values())
        self._busy: list[dict[int, None]] = [{} for _ in trunks]
        self._trunks = [tuple(number[name] for name in r.trunks) for r in routes]
        self._busy_on = [[self._busy[t] for t in trunks] for trunks in self._trunks]
        self._latency = [route.latency_s for route in routes]
        users = Counter(trunk for trunks in self._trunks for trunk in trunks)
        self._alone = [all(users[t] == 1 for t in trunks) for trunks in self._trunks]
        self._alone_rate = [
            min([self._capacity[t] for t in trunks], default=float("inf"))
            for trunks in self._trunks
        ]
        self._free_s = [0.0] * len(routes)
        self._queue: list[deque[tuple[float, Arrive]]] = [deque() for _ in routes]
        self._left_bytes = [0.0] * len(routes)
        self._rate = [0.0] * len(routes)
        self._since = [0.0] * len(routes)
        self._version = [0] * len(routes)
        self._events: list[tuple[float, int, int, Callable[[float], None] | int]] = []
        self._order = count()

    def run(self) -> None:
        """Run scheduled events until there are none left."""
        while self._events:
            now, _, version, what = heappop(self._events)
            if not isinstance(what, int):
                what(now)
            elif version == self._version[what]:
                self._finish(now, what)

    def at(self, time_s: float, event: Callable[[float], None]) -> None:
        """Schedule `event` to be called with the time `time_s`."""
        heappush(self._events, (time_s, next(self._order), 0, event))

    def arrival_s(self, sent_s: float, channel: int, size: float) -> float | None:
        """Send `size` bytes directly if no other channel shares a trunk.

        Return their arrival time, or None: then use `send`. Times must not decrease.
        """
        if not self._alone[channel]:
            return None
        begin_s = max(sent_s, self._free_s[channel])
        self._free_s[channel] = begin_s + size / self._alone_rate[channel]
        return self._free_s[channel] + self._latency[channel]

    def send(self, now: float, channel: int, size: float, arrive: Arrive) -> None:
        """Send `size` bytes; call this at the time `now`, that is, from an event."""
        if not self._trunks[channel]:
            arrive(now + self._latency[channel])
            return
        queue = self._queue[channel]
        queue.append((size, arrive))
        if len(queue) == 1:
            self._begin(now, channel)

    def _begin(self, now: float, channel: int) -> None:
        self._left_bytes[channel] = self._queue[channel][0][0]
        self._rate[channel], self._since[channel] = 0.0, now
        meets = any(self._busy_on[channel])
        for busy in self._busy_on[channel]:
            busy[channel] = None
        if meets:
            self._share(now, channel)
        else:
            self._rate[channel] = self._alone_rate[channel]
            self._promise(now, channel)

    def _finish(self, now: float, channel: int) -> None:
        queue = self._queue[channel]
        _, arrive = queue.popleft()
        if queue:
            # the next message gets the same share of the same trunks
            self._left_bytes[channel] = queue[0][0]
            self._since[channel] = now
            self._promise(now, channel)
        else:
            self._version[channel] += 1
            for busy in self._busy_on[channel]:
                del busy[channel]
            if any(self._busy_on[channel]):
                self._share(now, channel)
        arrive(now + self._latency[channel])

    def _share(self, now: float, channel: int) -> None:
        """Set the rates of all messages that share a trunk with this channel."""
        busy, capacity = self._busy, self._capacity
        for other in {other: None for t in self._trunks[channel] for other in busy[t]}:
            rate = min([capacity[t] / len(busy[t]) for t in self._trunks[other]])
            if rate != self._rate[other]:
                passed = now - self._since[other]
                self._left_bytes[other] -= self._rate[other] * passed
                self._rate[other], self._since[other] = rate, now
                self._promise(now, other)

    def _promise(self, now: float, channel: int) -> None:
        """Schedule the end of a channel's message, assuming its present rate."""
        self._version[channel] += 1
        end_s = now + max(self._left_bytes[channel], 0.0) / self._rate[channel]
        entry = (end_s, next(self._order), self._version[channel], channel)
        heappush(self._events, entry)
