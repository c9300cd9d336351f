# SPDX-License-Identifier: Apache-2.0
"""Simulates connections between processes that end, fall silent or are cut.

A connection delivers messages in the order in which they were sent, after a random
delay. If a relay drops, repeats or swaps a frame, the frame count shows it and the
connection ends. Each end learns separately that the other is gone: at once if the host
can report it, else after a period of silence. Until then it is half open. Owns
delivery, cuts between hosts and silence. Does not own what messages mean.
"""

from collections.abc import Callable
from typing import Any

from experiments.simulation.world import Process, World

SILENCE_S = 10.0
_LATENCY_S = 0.0005, 0.03
_HICCUP_S = 2.0  # added rarely

Receive = Callable[[Any], None]
Ended = Callable[[str], None]


class End:
    """One process's end of a connection."""

    def __init__(self, network: "Network", process: Process) -> None:
        self.network, self.process = network, process
        self.peer: End  # set once both exist
        self.received: Receive = lambda message: None
        self.ended: Ended = lambda reason: None
        self.is_open = True
        self._num_sent = self._num_received = 0
        self._free_s = 0.0  # when the last message arrives

    def send(self, message: Any) -> None:
        if self.is_open and self.process.is_alive:
            self._num_sent += 1
            for number in self.network.garbled(self._num_sent):
                self._carry(number, message)

    def close(self) -> None:
        """Close it here; the other end hears of it once it is reachable."""
        if self.is_open:
            self.is_open = False
            self.network.forget(self)
            self._carry(None, "left")

    def fail(self, reason: str) -> None:
        """End it for this process, and call `ended`."""
        if self.is_open:
            self.close()
            self.process.call(lambda: self.ended(reason))

    def _carry(self, number: int | None, message: Any) -> None:
        """Deliver to the other end, after all earlier messages and after any cut."""
        world, network = self.process.world, self.network
        at_s = max(world.now_s + network.latency_s(), self._free_s)
        self._free_s = at_s
        peer = self.peer

        def arrive() -> None:
            healed_s = network.cut_until_s(self.process.host, peer.process.host)
            if healed_s > world.now_s:
                world.after(healed_s - world.now_s, arrive)
            else:
                peer.process.call(lambda: peer.take(number, message))

        world.after(at_s - world.now_s, arrive)

    def take(self, number: int | None, message: Any) -> None:
        if not self.is_open:
            return
        if number is None:
            return self.fail(message)
        self._num_received += 1
        if number != self._num_received:
            return self.fail("sent an unreadable message (frames out of order)")
        self.received(message)


class Network:
    """All connections of a run, and until when hosts cannot reach each other."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._ends: dict[End, None] = {}
        self._cuts: dict[frozenset[str], float] = {}
        self._garble = 0

    def connect(self, one: Process, other: Process) -> tuple[End, End]:
        """Return both ends of a connection between live processes."""
        ends = End(self, one), End(self, other)
        ends[0].peer, ends[1].peer = ends[1], ends[0]
        self._ends |= dict.fromkeys(ends)
        if self.cut_until_s(one.host, other.host) > self.world.now_s:
            self._listen_for_silence(one.host, other.host)
        return ends

    def forget(self, end: End) -> None:
        self._ends.pop(end, None)

    def latency_s(self) -> float:
        latency_s = self.world.random.uniform(*_LATENCY_S)
        return latency_s + (_HICCUP_S if self.world.one_in(400) else 0.0)

    def garbled(self, number: int) -> list[int]:
        """Return the frames that arrive for one sent frame; usually only itself."""
        if not self._garble:
            return [number]
        self._garble -= 1
        return self.world.random.choice([[], [number, number], [number + 1]])

    def garble(self, count: int) -> None:
        """Let a relay drop, repeat or swap the next frames that are sent."""
        self._garble += count

    def garble_no_more(self) -> None:
        self._garble = 0

    def cut_until_s(self, one: str, other: str) -> float:
        return self._cuts.get(frozenset((one, other)), 0.0)

    def cut(self, one: str, other: str, for_s: float) -> None:
        """Let nothing pass between two hosts for a while; messages wait."""
        until_s = max(self.world.now_s + for_s, self.cut_until_s(one, other))
        self._cuts[frozenset((one, other))] = until_s
        self._listen_for_silence(one, other)

    def reset(self, one: str, other: str) -> None:
        """End all connections between two hosts; messages under way are lost."""
        for end in self._between(one, other):
            end.fail("closed the connection (reset)")

    def process_ended(self, process: Process) -> None:
        """Let peers learn that it is gone, at the latest after the silence limit."""
        for end in [end for end in self._ends if end.process is process]:
            end.close()
            peer = end.peer
            self.world.after(
                SILENCE_S,
                lambda p=peer: p.fail("gave no sign of life") if p.is_open else None,
            )

    def process_stopped(self, process: Process) -> None:
        """Let its peers give it up unless it continues in time."""
        ends = [end.peer for end in self._ends if end.process is process]

        def check() -> None:
            for peer in ends:
                if process.is_stopped and peer.is_open:
                    peer.fail("gave no sign of life")

        self.world.after(SILENCE_S, check)

    def _listen_for_silence(self, one: str, other: str) -> None:
        begin_s = self.world.now_s

        def check() -> None:
            is_cut = self.cut_until_s(one, other) > self.world.now_s
            if is_cut and self.world.now_s - begin_s >= SILENCE_S:
                for end in self._between(one, other):
                    end.process.call(lambda e=end: e.fail("gave no sign of life"))

        # the two sides do not notice at the same moment
        for _ in range(2):
            self.world.after(SILENCE_S + self.world.random.random(), check)

    def _between(self, one: str, other: str) -> list[End]:
        hosts = {one, other}
        return [e for e in self._ends if {e.process.host, e.peer.process.host} == hosts]
