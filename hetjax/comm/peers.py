# SPDX-License-Identifier: Apache-2.0
"""Connects a worker to the other workers: connections, arrived messages, lost peers.

Owns the connections of one process to its peers and the mailbox where their messages
wait to be taken. A waiting caller gets the loss of a peer as an error instead of
waiting for ever. Does not own one connection (`connections.py`) nor what messages mean.
"""

import threading
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from hetjax.comm.connections import SILENCE_S, Connection
from hetjax.comm.door import Listener
from hetjax.comm.frames import Key
from hetjax.comm.handshake import Ends, dial
from hetjax.comm.tls import Tls
from hetjax.comm.transport import Tally

_LARGE_BYTES = 1 << 20


class PeerLost(ConnectionError):
    """The awaited message will not come; `peer` is the worker that is gone."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"worker {peer!r} {reason}")
        self.peer, self.reason = peer, reason


class Mailbox:
    """Messages that have arrived and were not yet taken, by sender and key."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: dict[tuple[str, Key], np.ndarray] = {}
        self._lost: PeerLost | None = None
        self.version = 0  # changes with everything that ends `wait`

    def put(self, sender: str, key: Key, data: np.ndarray) -> None:
        with self._changed:
            self._messages[sender, key] = data
            self.touch()

    def has(self, sender: str, key: Key) -> bool:
        """Return whether the message has arrived and was not yet taken."""
        return (sender, key) in self._messages

    def pop(self, sender: str, key: Key) -> np.ndarray:
        """Take a message that has arrived."""
        return self._messages.pop((sender, key))

    def receive(self, sender: str, key: Key) -> np.ndarray:
        """Wait for a message and take it; raise PeerLost if any peer is lost."""
        with self._changed:
            while (sender, key) not in self._messages:
                self.check()
                self._changed.wait()
            return self._messages.pop((sender, key))

    def wait(self, version: int) -> int:
        """Return the version once it differs; raise PeerLost if any peer is lost."""
        with self._changed:
            while self.version == version:
                self.check()
                self._changed.wait()
            self.check()
            return self.version

    def touch(self) -> None:
        """Wake all waiting threads so that they check again."""
        with self._changed:
            self.version += 1
            self._changed.notify_all()

    def lose(self, peer: str, reason: str) -> None:
        """Report to all who wait, now or later, that a peer is gone."""
        with self._changed:
            self._lost = self._lost or PeerLost(peer, reason)
            self.touch()

    def check(self) -> None:
        """Raise PeerLost if a peer is gone."""
        if (lost := self._lost) is not None:
            raise PeerLost(lost.peer, lost.reason)


class Pace:
    """The time that the system takes to send large messages, by peer.

    The system takes small messages at once into its buffers; they say nothing of a
    link.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[str, tuple[int, float]] = {}

    def add(self, peer: str, num_bytes: int, seconds: float) -> None:
        """Count a message, if it is large."""
        if num_bytes >= _LARGE_BYTES:
            with self._lock:
                before, before_s = self._sent.get(peer, (0, 0.0))
                self._sent[peer] = before + num_bytes, before_s + seconds

    def pop_s_per_byte(self) -> list[tuple[str, float]]:
        """Return the seconds per byte to each peer since the last call."""
        with self._lock:
            sent, self._sent = self._sent, {}
        return [(peer, seconds / n) for peer, (n, seconds) in sent.items()]


class Peers:
    """The connections of worker `own` to the other workers of a run.

    Listens on `address` from construction on; `address` then has the port. `sent`
    counts the bytes to each peer, `pace` their speed. `incarnation` is this worker's.
    `coded` says whether what this worker sends carries codes if it is the caller (see
    `dial`).
    """

    def __init__(
        self,
        own: str,
        address: str,
        secret: bytes,
        silence_s: float = SILENCE_S,
        incarnation: int = 0,
        coded: bool | None = None,
        tls: Tls | None = None,
    ) -> None:
        self.own, self.mailbox, self.sent = own, Mailbox(), Tally()
        self.pace = Pace()
        self.links: dict[str, Connection] = {}
        self._secret, self._silence_s = secret, silence_s
        self._incarnation, self._coded, self._tls = incarnation, coded, tls
        self._admitted: dict[str, int] = {}  # how many connections, by peer
        self._joined = threading.Condition()
        self._listener = Listener(own, address, secret, self._add, tls)
        self.address = self._listener.address

    def connect(self, addresses: Mapping[str, str], timeout_s: float) -> None:
        """Connect to all peers by name; of two workers, the one first in order calls.

        Raises PeerLost with the name of a peer that did not come or could not be
        reached, and as soon as any peer is lost.
        """
        for peer, address in addresses.items():
            if self.own < peer:
                self._add(self._dial(peer, address), peer)

        def are_there() -> bool:
            self.mailbox.check()
            return addresses.keys() <= self.links.keys()

        with self._joined:
            if not self._joined.wait_for(are_there, timeout_s):
                missing = min(addresses.keys() - self.links.keys())
                raise PeerLost(missing, f"did not connect within {timeout_s:g} s")

    def lose(self, peer: str, reason: str) -> None:
        """Report to all who wait, now or later, that a peer is gone."""
        self.mailbox.lose(peer, reason)
        with self._joined:
            self._joined.notify_all()

    def send(self, peer: str, key: Key, parts: Sequence[np.ndarray]) -> None:
        """Send a message; return at once."""
        self.sent.add(peer, key[2], sum(part.nbytes for part in parts))
        self.links[peer].send(key, parts)

    def close(self) -> None:
        """Send what is queued, then end all connections."""
        self._listener.close()
        for link in self.links.values():
            link.close()

    def _dial(self, peer: str, address: str) -> Ends:
        try:
            return dial(
                address,
                self.own,
                peer,
                self._secret,
                self._incarnation,
                self._coded,
                self._tls,
            )
        except OSError as error:
            raise PeerLost(peer, f"cannot be reached at {address} ({error})") from error

    def _add(self, found: Ends, peer: str, incarnation: int = 0) -> None:
        """Admit a peer; closing a replaced connection is not reported as a loss."""
        with self._joined:
            number = self._admitted[peer] = self._admitted.get(peer, 0) + 1
            earlier = self.links.get(peer)
            self.links[peer] = Connection(
                found,
                peer,
                partial(self._deliver, number),
                partial(self._lose, number),
                self._silence_s,
                partial(self.pace.add, peer),
            )
            self._joined.notify_all()
        if earlier is not None:
            earlier.close()

    def _deliver(self, number: int, peer: str, key: Key, data: np.ndarray) -> None:
        if self._admitted[peer] == number:
            self.mailbox.put(peer, key, data)

    def _lose(self, number: int, peer: str, reason: str) -> None:
        if self._admitted[peer] == number:
            self.lose(peer, reason)
