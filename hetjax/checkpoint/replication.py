# SPDX-License-Identifier: Apache-2.0
"""Copies a worker's saves to the disks of other nodes.

    <directory of B>/step_00000010/<A>/...  as on A's disk, the manifest last

Owns which peers store whose copies, sending copies, and storing those of peers. A copy
is acknowledged once it is as durable as the original. Does not own the connections
(`hetjax/comm/connections.py`) nor when to copy (`writer.py`).
"""

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hetjax.checkpoint.disk import (
    fsync,
    make_directory,
    remove_part,
    replace_text,
    retain,
)
from hetjax.checkpoint.file_records import record_of_bytes
from hetjax.checkpoint.format import (
    MANIFEST,
    Manifest,
    from_text,
    part_directory,
    read_manifest_text,
)
from hetjax.checkpoint.run_identity import RunIdentity, is_ours
from hetjax.checkpoint.stores.store import StoreError
from hetjax.comm.connections import SILENCE_S, Connection
from hetjax.comm.door import Listener
from hetjax.comm.frames import Key
from hetjax.comm.handshake import Ends, dial
from hetjax.comm.tls import Tls
from hetjax.names import inside

GATHERER = "controller"  # the name of what stores parts on the controller's machine
_LONGEST_S = 3600.0  # timeout of a copy, even if its peer is alive
_MANIFEST, _FILE, _STORED, _REFUSED = range(4)  # kind of message, first in its key


def copy_targets(nodes: Mapping[str, str], copies: int) -> dict[str, list[str]]:
    """Return the peers that store copies for each worker.

    The worker's own node is one of `copies`. `nodes` is the node of each worker. If
    there are fewer nodes than `copies`, all of them have one.

    >>> copy_targets({"a": "a", "b": "b", "c": "c"}, 2)
    {'a': ['b'], 'b': ['c'], 'c': ['a']}
    """
    first = {node: worker for worker, node in reversed([*nodes.items()])}
    ring = list(dict.fromkeys(nodes.values()))
    found = {}
    for worker, node in nodes.items():
        at = ring.index(node)
        others = [ring[(at + n) % len(ring)] for n in range(1, min(copies, len(ring)))]
        found[worker] = [first[other] for other in others]
    return found


@dataclass(slots=True)
class _IncomingPart:
    """A part of a peer that is being received."""

    text: str
    manifest: Manifest
    names: list[str]
    also: frozenset[int]
    missing: set[int] = field(default_factory=set)


class PeerReplication:
    """Sends one worker's parts to peers, and stores those of peers on its own disk.

    `name` is the worker's file name; peers are known by theirs, too. Listens from
    construction on.
    """

    def __init__(
        self,
        name: str,
        host: str,
        secret: bytes,
        silence_s: float = SILENCE_S,
        incarnation: int = 0,
        tls: Tls | None = None,
    ) -> None:
        self._name, self._secret, self._silence_s = name, secret, silence_s
        self._incarnation, self._tls = incarnation, tls
        self._directory, self._keep = Path(), 1
        self._run: RunIdentity | None = None
        self._changed = threading.Condition()
        self._to: dict[str, Connection] = {}
        self._from: dict[str, Connection] = {}
        self._answers: dict[tuple[str, int], bool] = {}
        self._lost: dict[str, str] = {}
        self._incoming: dict[str, _IncomingPart] = {}
        self._closed = False
        self._listener = Listener(name, f"{host}:0", secret, self._accept, tls)
        self.address = self._listener.address

    def store_in(
        self, directory: Path, keep: int, run: RunIdentity | None = None
    ) -> None:
        """Store the parts of peers in `directory`, the newest `keep` steps of each.

        Refuses parts of runs other than `run`.
        """
        self._directory, self._keep, self._run = directory, keep, run

    def send_to(self, addresses: Mapping[str, str]) -> None:
        """Replicate to these peers from now on; raises OSError."""
        for link in self._to.values():
            link.close()
        self._to, self._lost = {}, {}
        for name, address in addresses.items():
            own, secret = self._name, self._secret
            found = dial(address, own, name, secret, self._incarnation, tls=self._tls)
            self._to[name] = Connection(
                found, name, self._on_answer, self._on_lost, self._silence_s
            )

    def replicate(self, part: Path, step: int, also: Collection[int] = ()) -> None:
        """Send this worker's part of a step; return once all peers have stored it.

        Peers also keep the steps in `also` (at most two), as this worker does. Raises
        StoreError naming a peer that has no copy.
        """
        text = read_manifest_text(part / MANIFEST)
        names = sorted(from_text(text).files)
        for name, link in self._to.items():
            self._answers.pop((name, step), None)
            first, second = [*(s + 1 for s in sorted(also)), 0, 0][:2]
            start = _MANIFEST, step, first, second, 0, 0
            link.send(start, [np.frombuffer(text.encode(), np.uint8)])
            for number, file in enumerate(names):
                link.send((_FILE, step, number, 0, 0, 0), [_bytes(part / file)])
        for name in self._to:
            self._wait(name, step)

    def close(self) -> None:
        self._listener.close()
        with self._changed:
            self._closed = True
            links = [*self._to.values(), *self._from.values()]
        for link in links:
            link.close()

    def _wait(self, name: str, step: int) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: (name, step) in self._answers or name in self._lost, _LONGEST_S
            )
            if not self._answers.pop((name, step), False):
                why = self._lost.get(name, "could not write it")
                raise StoreError(f"worker {name!r} has no copy of step {step}: {why}")

    def _on_answer(self, name: str, key: Key, data: np.ndarray) -> None:
        with self._changed:
            self._answers[name, key[1]] = key[0] == _STORED
            self._changed.notify_all()

    def _on_lost(self, name: str, reason: str) -> None:
        with self._changed:
            self._lost[name] = reason
            self._changed.notify_all()

    def _accept(self, found: Ends, name: str, incarnation: int) -> None:
        with self._changed:
            if self._closed:
                return found.close()
            earlier = self._from.get(name)
            self._from[name] = Connection(
                found, name, self._receive, lambda *_: None, self._silence_s
            )
        if earlier is not None:
            earlier.close()

    def _receive(self, name: str, key: Key, data: np.ndarray) -> None:
        """Handle a message on the connection's thread: slow writes slow the sender."""
        kind, step, number, second, *_ = key
        with self._changed:
            link = self._from[name]
        try:
            if kind == _MANIFEST:
                also = frozenset(s - 1 for s in (number, second) if s)
                self._begin_part(name, data.tobytes().decode(), also)
            elif name in self._incoming:
                self._write_file(name, number, data)
            if name in self._incoming and not self._incoming[name].missing:
                self._commit(self._incoming.pop(name))
                link.send((_STORED, step, 0, 0, 0, 0), [])
        except (OSError, ValueError, LookupError):
            self._incoming.pop(name, None)
            link.send((_REFUSED, step, 0, 0, 0, 0), [])

    def _begin_part(self, name: str, text: str, also: frozenset[int]) -> None:
        manifest = from_text(text)
        if manifest.worker != name:
            raise ValueError(f"{name} sends a part of {manifest.worker}")
        if not is_ours(self._run, manifest.run):
            raise ValueError(f"{name} sends a part of run {manifest.run}")
        incoming = _IncomingPart(text, manifest, sorted(manifest.files), also)
        part = self._part(manifest)
        if _manifest_text(part) != text:  # if equal, both workers share a disk
            remove_part(part)
            incoming.missing = set(range(len(incoming.names)))
        self._incoming[name] = incoming

    def _write_file(self, name: str, number: int, data: np.ndarray) -> None:
        incoming = self._incoming[name]
        file = incoming.names[number]
        if number not in incoming.missing:
            return
        content = data.tobytes()
        if record_of_bytes(content) != incoming.manifest.files[file]:
            raise ValueError(f"{file} is not what was sent")
        path = inside(self._part(incoming.manifest), file)
        make_directory(path.parent)
        path.write_bytes(content)
        fsync(path)
        incoming.missing.discard(number)

    def _commit(self, incoming: _IncomingPart) -> None:
        part = self._part(incoming.manifest)
        if _manifest_text(part) != incoming.text:
            for path in (*(p for p in part.rglob("*") if p.is_dir()), part):
                fsync(path)
            replace_text(part / MANIFEST, incoming.text)
            for path in (part, part.parent, self._directory):
                fsync(path)
        worker, last = incoming.manifest.worker, incoming.manifest.step
        retain(self._directory, worker, last, self._keep, incoming.also)

    def _part(self, manifest: Manifest) -> Path:
        return part_directory(self._directory, manifest.step, manifest.worker)


def _manifest_text(part: Path) -> str | None:
    try:
        return read_manifest_text(part / MANIFEST)
    except FileNotFoundError:
        return None


def _bytes(path: Path) -> np.ndarray:
    """Return the file's bytes as a memory map, read when they are sent."""
    if not path.stat().st_size:
        return np.zeros(0, np.uint8)
    return np.memmap(path, np.uint8, "r")
