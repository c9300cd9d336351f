# SPDX-License-Identifier: Apache-2.0
"""Transfers arrays between stages of different processes, from device to device.

Owns the ids of offers, the transfer server of a process, and the transport over it. A
sender offers pieces of rows, and announces them by link once they are computed. Only
then does the receiver pull them; it acknowledges by link when it has them. This bounds
memory: what is not yet received stays where it was computed. Does not own connections
and lost peers (`connections.py`, `peers.py`), nor transfers by link alone (`wire.py`).

The transfer server checks neither who pulls nor what is pulled: offers have ids that
cannot be guessed, and both sides derive the pieces from the same degrees. The transfer
is not encrypted.
"""

import hashlib
import ipaddress
import socket
import threading
from collections.abc import Mapping, Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from hetjax.comm.connections import Key
from hetjax.comm.peers import Mailbox, PeerLost, Peers
from hetjax.comm.transport import Tag
from hetjax.comm.wire import HostWorkPool, RowRange, key_of
from hetjax.errors import BadInput
from hetjax.mesh.reshard import shard_boxes

_BITS = (8, 16, 1, 12, 11, 16)  # of each number of `key_of`
_HALF_BITS, _NUM_ROUNDS = 32, 4
_OFFERED = {"F": 4, "B": 5}  # kinds of link messages, beside those of `wire.py`
_ACKNOWLEDGED = {"F": 6, "B": 7}
_NUM_LANES = 4  # connections to each peer; more do not speed up large arrays
_CHUNK_BYTES = 1 << 20
_LOOK_S = 0.1  # interval of the checks for lost peers and acknowledgements
_NOTHING = np.empty(0, np.uint8)


def offer_id(tag: Tag, secret: bytes) -> int:
    """Return the 64-bit id of a tag's offer: a keyed permutation of the packed tag.

    Four Feistel rounds over 32-bit halves, whose round function is BLAKE2b keyed by the
    secret (1 to 64 bytes). So ids cannot be guessed without the secret. Tags whose
    numbers fit (`check_fits`) cannot collide, so no check for collisions is needed.
    Generation and step count modulo 2^8 and 2^16.
    """
    assert secret, "without a secret everybody knows the ids"
    code = 0
    for number, bits in zip(key_of(tag), _BITS, strict=True):
        code = code << bits | number % (1 << bits)
    left, right = divmod(code, 1 << _HALF_BITS)
    for turn in range(_NUM_ROUNDS):
        left, right = right, left ^ _mixed(right, turn, secret)
    return left << _HALF_BITS | right


def check_fits(*, num_replicas: int, num_stages: int, num_microbatches: int) -> None:
    """Raise BadInput if ids could not tell all tags of a plan apart.

    `num_stages` and `num_microbatches` are the most of any replica.
    """
    found = (num_replicas, num_stages, num_microbatches)
    names = ("replicas", "stages in a replica", "microbatches in a replica")
    for number, name, bits in zip(found, names, _BITS[3:], strict=True):
        if number > 1 << bits:
            raise BadInput(
                got=f"a plan with {number} {name}",
                allowed=f"at most {1 << bits} with --transport transfer",
                fix=f"plan with fewer {name.split()[0]}, or use --transport sockets",
            )


@cache
def row_ranges(num_rows: int, *degrees: int) -> tuple[RowRange, ...]:
    """Return the ranges of rows that result if all data degrees cut them, in order."""
    assert all(num_rows % degree == 0 for degree in degrees), (num_rows, degrees)
    ranks = (range(0, num_rows, num_rows // degree) for degree in degrees)
    starts = sorted(set[int]().union(*ranks))
    return tuple(zip(starts, [*starts[1:], num_rows], strict=True))


class PullServer:
    """The pieces that this process offers, and its connections to servers of others.

    Listens only on `host`, an address that peers reach, as long as the process lives.
    Offers and connections belong to one generation, from `join` to `drop`. Raises
    BadInput for a host that would mean all interfaces.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        endpoint = f"{_address(host)}:0"
        client = jax.local_devices()[0].client
        # without lanes, pulls from other processes hang
        self._server = transfer.start_transfer_server(
            client, endpoint, [endpoint] * _NUM_LANES, transfer_size=_CHUNK_BYTES
        )
        self._secret = secret
        self._lock = threading.Lock()
        self._mailbox: Mailbox | None = None
        self._ended = threading.Event()
        self._connections: dict[str, transfer.TransferConnection] = {}
        self._held: dict[tuple[str, Key], Sequence[jax.Array]] = {}

    @property
    def address(self) -> str:
        """The address that others connect to."""
        return self._server.address()

    def join(self, mailbox: Mailbox) -> None:
        """Start the generation whose acknowledgements and losses arrive in the mailbox.

        Does nothing if that generation has started; ends the previous one.
        """
        if mailbox is self._mailbox:
            return
        self.drop()
        with self._lock:
            self._mailbox, self._ended = mailbox, threading.Event()
            watch = partial(self._watch, mailbox, self._ended)
        threading.Thread(target=watch, name="pulls", daemon=True).start()

    def drop(self) -> None:
        """End the generation: pending pulls fail, and offers are discarded."""
        with self._lock:
            self._ended.set()
            self._mailbox = None
            self._poison()
            self._connections.clear()
            self._held.clear()
            # otherwise offers that were never pulled would keep their memory
            self._server._reset_rendevous_table()  # pyright: ignore

    def hold(self, node: str, acknowledged: Key, pieces: Sequence[jax.Array]) -> None:
        """Keep pieces until the node sends a message under that key."""
        self._held[node, acknowledged] = pieces

    def offer(self, tag: Tag, pieces: Sequence[jax.Array]) -> None:
        """Let anyone who knows the secret pull the pieces once, in their order."""
        self._server.await_pull(offer_id(tag, self._secret), pieces)

    def pull(
        self, address: str, tag: Tag, pieces: Sequence[jax.ShapeDtypeStruct]
    ) -> list[jax.Array]:
        """Start to fetch what a peer's server offers, each piece to its one device.

        Returns at once: if the server does not answer, pulls stay pending until the
        peer is lost, or until `drop`. Raises PeerLost; a peer lost later makes the
        arrays fail.
        """
        with self._lock:
            assert self._mailbox is not None, "join first"
            self._mailbox.check()
            if address not in self._connections:
                self._connections[address] = self._server.connect(address)
            connection = self._connections[address]
        return connection.pull(offer_id(tag, self._secret), list(pieces))

    def release(self) -> None:
        """Drop the pieces that their receivers have acknowledged."""
        with self._lock:
            if self._mailbox is None:
                return
            for node, key in list(self._held):
                if self._mailbox.has(node, key):
                    self._mailbox.pop(node, key)
                    del self._held[node, key]

    def _watch(self, mailbox: Mailbox, ended: threading.Event) -> None:
        """Drop acknowledged pieces; fail all pulls once a peer is lost.

        A silent peer would otherwise leave pulls pending for ever.
        """
        while not ended.wait(_LOOK_S):
            try:
                mailbox.check()
            except PeerLost:
                with self._lock:
                    if not ended.is_set():
                        self._poison()
                return
            self.release()

    def _poison(self) -> None:
        """Fail all present and future pulls over the connections."""
        for connection in self._connections.values():
            connection._poison_connection()  # pyright: ignore


class TransferTransport:
    """The transport of one worker to stages of others, by pull; for one generation.

    `nodes` maps each stage to its worker, `degrees` to its data degree, both by
    (replica, stage). Devices wait for pulled data; this process never does.
    """

    def __init__(
        self,
        peers: Peers,
        pool: HostWorkPool,
        nodes: Mapping[tuple[int, int], str],
        server: PullServer,
        degrees: Mapping[tuple[int, int], int],
    ) -> None:
        self._peers, self._pool = peers, pool
        self._nodes, self._server, self._degrees = nodes, server, degrees
        self._pulled: dict[Tag, Sequence[jax.Array]] = {}
        server.join(peers.mailbox)

    def send(self, tag: Tag, x: jax.Array) -> None:
        node = self._nodes[tag.receiver]
        self._server.release()
        # cut now, in the device's queue, not after actions that are enqueued later
        pieces = _cut(x, self._degrees[tag.sender], self._ranges(tag, x.shape[0]))
        self._server.hold(node, key_of(tag, _ACKNOWLEDGED), pieces)
        about = f"{self._server.address} {_form(x)}".encode()
        self._pool.run(lambda: self._offer(node, tag, pieces, about))

    def arrived(self, tag: Tag) -> bool:
        self._server.release()
        return self._peers.mailbox.has(self._nodes[tag.sender], key_of(tag, _OFFERED))

    def receive(self, tag: Tag, expected: jax.ShapeDtypeStruct) -> jax.Array:
        sender = self._nodes[tag.sender]
        about = self._peers.mailbox.pop(sender, key_of(tag, _OFFERED))
        address, _, found = about.tobytes().decode().partition(" ")
        assert found == _form(expected), f"{tag}: {found}, not {_form(expected)}"
        holders = _holders(expected)
        assert len(holders) == self._degrees[tag.receiver], expected.sharding
        ranges = self._ranges(tag, expected.shape[0])
        wanted = [_piece(expected, r, holders[_rank(holders, r)][0]) for r in ranges]
        pieces = self._server.pull(address, tag, wanted)
        self._pulled[tag] = pieces
        self._pool.run(lambda: self._acknowledge(sender, tag))
        return _assembled(expected, holders, dict(zip(ranges, pieces, strict=True)))

    def _ranges(self, tag: Tag, num_rows: int) -> tuple[RowRange, ...]:
        sides = tag.sender, tag.receiver
        return row_ranges(num_rows, *(self._degrees[side] for side in sides))

    def _offer(
        self, node: str, tag: Tag, pieces: Sequence[jax.Array], about: bytes
    ) -> None:
        try:
            jax.block_until_ready(pieces)
        except JaxRuntimeError:
            # if an input failed to arrive, its sender is lost, not this worker
            for earlier, pulled in list(self._pulled.items()):
                self._complete(self._nodes[earlier.sender], pulled)
            raise
        self._server.offer(tag, pieces)
        self._peers.sent.add(node, key_of(tag)[2], sum(x.nbytes for x in pieces))
        note = np.frombuffer(about, np.uint8)
        self._peers.send(node, key_of(tag, _OFFERED), [note])

    def _acknowledge(self, sender: str, tag: Tag) -> None:
        if self._complete(sender, self._pulled[tag]):
            self._peers.send(sender, key_of(tag, _ACKNOWLEDGED), [_NOTHING])
            del self._pulled[tag]

    def _complete(self, sender: str, pieces: Sequence[jax.Array]) -> bool:
        """Wait for pulled pieces; report their sender as lost if they do not come."""
        try:
            jax.block_until_ready(pieces)
        except JaxRuntimeError as error:
            reason = str(error).partition("\n")[0]
            self._peers.mailbox.lose(sender, f"aborted a transfer ({reason})")
            return False
        return True


def _address(host: str) -> str:
    found = socket.gethostbyname(host)
    if ipaddress.ip_address(found).is_unspecified:
        raise BadInput(
            got=f"a transfer server on host {host!r}, which means all interfaces",
            allowed="one address of this machine that the other workers reach",
            fix="give this node's own address, such as 127.0.0.1 or 10.0.0.5",
        )
    return found


def _mixed(half: int, turn: int, secret: bytes) -> int:
    """Return the round function: 32 bits that depend on all of its arguments."""
    data = half.to_bytes(4, "big")
    digest = hashlib.blake2b(data, digest_size=4, key=secret, salt=bytes([turn]))
    return int.from_bytes(digest.digest(), "big")


def _form(x: jax.Array | jax.ShapeDtypeStruct) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def _holders(x: jax.Array | jax.ShapeDtypeStruct) -> dict[RowRange, list[jax.Device]]:
    """Return the devices of each data rank, by its rows; no other dim may be cut."""
    found: dict[RowRange, list[jax.Device]] = {}
    for device, (rows, *rest) in shard_boxes(x.sharding, x.shape).items():
        assert rest == [(0, size) for size in x.shape[1:]], x.sharding
        found.setdefault(rows, []).append(device)
    return found


def _rank(
    holders: Mapping[RowRange, Sequence[jax.Device]], piece: RowRange
) -> RowRange:
    """Return the rows of the data rank that the piece is cut from or joined into."""
    return next(rows for rows in holders if rows[0] <= piece[0] < rows[1])


def _cut(x: jax.Array, degree: int, ranges: Sequence[RowRange]) -> list[jax.Array]:
    """Return pieces of rows on the devices that hold them; tensor ranks take turns."""
    holders = _holders(x)
    assert len(holders) == degree, (x.sharding, degree)
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    pieces = []
    for turn, piece in enumerate(ranges):
        rows = _rank(holders, piece)
        shard = shards[holders[rows][turn % len(holders[rows])]]
        if piece != rows:
            start, size = np.int32(piece[0] - rows[0]), piece[1] - piece[0]
            shard = _sliced(shard, start, size)
        pieces.append(shard)
    return pieces


def _piece(
    expected: jax.ShapeDtypeStruct, rows: RowRange, device: jax.Device
) -> jax.ShapeDtypeStruct:
    shape = (rows[1] - rows[0], *expected.shape[1:])
    target = SingleDeviceSharding(device)
    return jax.ShapeDtypeStruct(shape, expected.dtype, sharding=target)


def _assembled(
    expected: jax.ShapeDtypeStruct,
    holders: Mapping[RowRange, Sequence[jax.Device]],
    pieces: Mapping[RowRange, jax.Array],
) -> jax.Array:
    """Join the pieces of each data rank, and copy them to its other tensor devices."""
    shards: dict[jax.Device, jax.Array] = {}
    for rows, (joint, *others) in holders.items():
        parts = [pieces[at] for at in sorted(pieces) if _rank(holders, at) == rows]
        shards[joint] = parts[0] if len(parts) == 1 else _joined(*parts)
        shards |= {other: jax.device_put(shards[joint], other) for other in others}
    assert expected.sharding is not None
    return jax.make_array_from_single_device_arrays(
        expected.shape, expected.sharding, list(shards.values()), dtype=expected.dtype
    )


@partial(jax.jit, static_argnames="num_rows")
def _sliced(shard: jax.Array, start: jax.Array, num_rows: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(shard, start, num_rows)


@jax.jit
def _joined(*parts: jax.Array) -> jax.Array:
    return jnp.concatenate(parts, axis=0)
