# SPDX-License-Identifier: Apache-2.0
"""Connects simulated workers to each other, and keeps the messages of their links.

Owns the links of an epoch: calling, being called, and learning that a peer is gone.
Does not own delivery (`network.py`) nor the messages' content (`worker.py`).
"""

from collections.abc import Callable, Collection
from typing import Any

from experiments.simulation.network import End, Network
from experiments.simulation.world import Process

CONNECT_S = 120.0  # until all peers must have called
_CALL_S = 30.0  # a host that stays unreachable for longer is given up


class PeerGone(Exception):
    """Another worker is lost, so this request cannot finish."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(peer, reason)
        self.peer, self.reason = peer, reason


class Peers:
    """A worker's links in an epoch, and their messages; each change calls `look`."""

    def __init__(
        self, process: Process, network: Network, look: Callable[[], None]
    ) -> None:
        self.process, self._network, self._look = process, network, look
        self.ends: dict[str, End] = {}
        self.messages: dict[tuple[str, Any], Any] = {}
        self.lost: tuple[str, str] | None = None

    def lose(self, peer: str, reason: str) -> None:
        self.lost = self.lost or (peer, reason)
        self._look()

    def check(self) -> None:
        """Raise PeerGone if a peer is lost."""
        if self.lost is not None:
            raise PeerGone(*self.lost)

    def are_there(self, peers: Collection[str], end_s: float) -> bool:
        """Whether all of these are linked. Raises PeerGone if one is lost or late."""
        missing = {*peers} - self.ends.keys()
        if missing:
            self.check()
            if self.process.world.now_s > end_s:
                raise PeerGone(min(missing), "did not connect")
        return not missing

    def call(self, other: "Peers", address: str) -> None:
        """Make a link once the host is reachable."""
        here, there = self.process, other.process
        world, network = here.world, self._network
        cut_s = network.cut_until_s(here.host, there.host) - world.now_s

        def call() -> None:
            if not there.is_alive:
                return self.lose(there.host, f"cannot be reached at {address}")
            mine, its = network.connect(here, there)
            self._take_over(there.host, mine)
            there.call(lambda: other._take_over(here.host, its))

        if cut_s > _CALL_S:
            here.after(_CALL_S, lambda: self.lose(there.host, "timed out"))
        else:
            here.after(max(0.0, cut_s) + network.latency_s(), call)

    def _take_over(self, peer: str, end: End) -> None:
        def received(message: tuple[Any, Any]) -> None:
            key, value = message
            self.messages[peer, key] = value
            self._look()

        end.received = received
        end.ended = lambda reason: self.lose(peer, reason)
        self.ends[peer] = end
        self._look()
