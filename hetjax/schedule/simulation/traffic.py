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
from typing import Any, TypeVar

from hetjax.costs.costs import Route

T = TypeVar("T")
Event = Callable[[float, Any], None]  # called with its time and an argument


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
        self.is_alone = [all(users[t] == 1 for t in trunks) for trunks in self._trunks]
        self._alone_rate = [
            min([self._capacity[t] for t in trunks], default=float("inf"))
            for trunks in self._trunks
        ]
        self._free_s = [0.0] * len(routes)
        # by channel: bytes of each message, and what to call when it arrives
        self._queue: list[deque[tuple[float, Event, Any]]] = [deque() for _ in routes]
        self._left_bytes = [0.0] * len(routes)
        self._rate = [0.0] * len(routes)
        self._since = [0.0] * len(routes)
        self._version = [0] * len(routes)
        self._events: list[tuple[float, int, Event, Any]] = []
        self._order = count()

    def run(self) -> None:
        """Run scheduled events until there are none left."""
        events = self._events
        while events:
            now, _, event, argument = heappop(events)
            event(now, argument)

    def at(self, time_s: float, event: Callable[[float, T], None], argument: T) -> None:
        """Schedule a call of `event` with the time `time_s` and the argument."""
        heappush(self._events, (time_s, next(self._order), event, argument))

    def arrival_s(self, sent_s: float, channel: int, size: float) -> float:
        """Send `size` bytes on a channel that shares no trunk; return their arrival.

        Times must not decrease.
        """
        begin_s = max(sent_s, self._free_s[channel])
        self._free_s[channel] = begin_s + size / self._alone_rate[channel]
        return self._free_s[channel] + self._latency[channel]

    def send(
        self,
        now: float,
        channel: int,
        size: float,
        arrive: Callable[[float, T], None],
        argument: T,
    ) -> None:
        """Send `size` bytes; call this at the time `now`, that is, from an event.

        Calls `arrive` with the arrival time and the argument once that time is known.
        """
        if not self._trunks[channel]:
            arrive(now + self._latency[channel], argument)
            return
        queue = self._queue[channel]
        queue.append((size, arrive, argument))
        if len(queue) == 1:
            self._begin(now, channel)

    def _begin(self, now: float, channel: int) -> None:
        self._left_bytes[channel] = self._queue[channel][0][0]
        self._rate[channel], self._since[channel] = 0.0, now
        busy_on = self._busy_on[channel]
        meets = any(busy_on)
        for busy in busy_on:
            busy[channel] = None
        if meets:
            self._share(now, channel)
        else:
            self._rate[channel] = self._alone_rate[channel]
            self._promise(now, channel)

    def _finish(self, now: float, promised: tuple[int, int]) -> None:
        channel, version = promised
        if version != self._version[channel]:
            return  # its rate has changed since
        queue = self._queue[channel]
        _, arrive, argument = queue.popleft()
        if queue:
            # the next message gets the same share of the same trunks
            self._left_bytes[channel] = queue[0][0]
            self._since[channel] = now
            self._promise(now, channel)
        else:
            self._version[channel] += 1
            busy_on = self._busy_on[channel]
            for busy in busy_on:
                del busy[channel]
            if any(busy_on):
                self._share(now, channel)
        arrive(now + self._latency[channel], argument)

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
        self.at(end_s, self._finish, (channel, self._version[channel]))
