# SPDX-License-Identifier: Apache-2.0
"""Copies of what a worker has saved, on the disks of other nodes.

    <directory of B>/step_00000010/<A>/...  as on A's disk, the manifest last

Owns who keeps copies for whom, sending them, and keeping those of others. A copy is
acknowledged once it is as durable as the original. Does not own the connections
(`hetjax/comm/links.py`) nor when there is something to copy (`save.py`).
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hetjax.checkpoint.disk import is_complete, make, remove
from hetjax.checkpoint.durable import fsync, replace_text
from hetjax.checkpoint.format import MANIFEST, part_directory, step_numbers
from hetjax.checkpoint.manifest import Manifest, from_text, record_of
from hetjax.checkpoint.stores.store import StoreError
from hetjax.comm.links import SILENCE_S, Door, Ends, Key, Link, dial
from hetjax.names import inside

_LONGEST_S = 3600.0  # until a copy is given up, though its keeper lives
_MANIFEST, _FILE, _KEPT, _REFUSED = range(4)  # what a message is, first in its key


def keepers(nodes: Mapping[str, str], copies: int) -> dict[str, list[str]]:
    """Who keeps copies for each worker, so that `copies` nodes have it with its own.

    `nodes` has the node of each worker; as many as there are, if they are fewer.

    >>> keepers({"a": "a", "b": "b", "c": "c"}, 2)
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
class _Arriving:
    """A part of another worker that is on its way here."""

    text: str
    manifest: Manifest
    names: list[str]
    safe: int
    missing: set[int] = field(default_factory=set)


class Copies:
    """One worker's exchange of copies; parts of others go to `directory`.

    `name` is its file name, and so are those of others. Listens at once.
    """

    def __init__(
        self, name: str, host: str, secret: bytes, silence_s: float = SILENCE_S
    ) -> None:
        self._name, self._secret, self._silence_s = name, secret, silence_s
        self._directory, self._keep = Path(), 1
        self._changed = threading.Condition()
        self._to: dict[str, Link] = {}
        self._from: dict[str, Link] = {}
        self._answers: dict[tuple[str, int], bool] = {}
        self._lost: dict[str, str] = {}
        self._arriving: dict[str, _Arriving] = {}
        self._closed = False
        self._door = Door(name, f"{host}:0", secret, self._admit)
        self.address = self._door.address

    def keep_in(self, directory: Path, keep: int) -> None:
        """Where parts of others go, and how many steps of each stay."""
        self._directory, self._keep = directory, keep

    def send_to(self, addresses: Mapping[str, str]) -> None:
        """Send copies to these from now on; raises OSError."""
        for link in self._to.values():
            link.close()
        self._to, self._lost = {}, {}
        for name, address in addresses.items():
            found = dial(address, self._name, name, self._secret)
            self._to[name] = Link(found, name, self._hear, self._gone, self._silence_s)

    def copy(self, own: Path, step: int, safe: int | None) -> None:
        """Send this worker's part of a step; returns once all have it.

        Step `safe` stays there as it does here. Raises StoreError naming one that has
        not got it.
        """
        text = (own / MANIFEST).read_text()
        names = sorted(from_text(text).files)
        for name, link in self._to.items():
            self._answers.pop((name, step), None)
            start = _MANIFEST, step, 0 if safe is None else safe + 1, 0, 0, 0
            link.send(start, [np.frombuffer(text.encode(), np.uint8)])
            for number, file in enumerate(names):
                link.send((_FILE, step, number, 0, 0, 0), [_bytes(own / file)])
        for name in self._to:
            self._wait(name, step)

    def close(self) -> None:
        self._door.close()
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

    def _hear(self, name: str, key: Key, data: np.ndarray) -> None:
        with self._changed:
            self._answers[name, key[1]] = key[0] == _KEPT
            self._changed.notify_all()

    def _gone(self, name: str, reason: str) -> None:
        with self._changed:
            self._lost[name] = reason
            self._changed.notify_all()

    def _admit(self, found: Ends, name: str) -> None:
        with self._changed:
            if self._closed:
                return found.close()
            earlier = self._from.get(name)
            self._from[name] = Link(
                found, name, self._take, lambda *_: None, self._silence_s
            )
        if earlier is not None:
            earlier.close()

    def _take(self, name: str, key: Key, data: np.ndarray) -> None:
        """Called by the link's thread: writing here slows down who sends."""
        kind, step, number, *_ = key
        with self._changed:
            link = self._from[name]
        try:
            if kind == _MANIFEST:
                self._begin(name, data.tobytes().decode(), number - 1)
            elif name in self._arriving:
                self._put(name, number, data)
            if name in self._arriving and not self._arriving[name].missing:
                self._commit(self._arriving.pop(name))
                link.send((_KEPT, step, 0, 0, 0, 0), [])
        except (OSError, ValueError, LookupError):
            self._arriving.pop(name, None)
            link.send((_REFUSED, step, 0, 0, 0, 0), [])

    def _begin(self, name: str, text: str, safe: int) -> None:
        manifest = from_text(text)
        names = sorted(manifest.files)
        if manifest.worker != name:
            raise ValueError(f"{name} sends a part of {manifest.worker}")
        arriving = _Arriving(text=text, manifest=manifest, names=names, safe=safe)
        if _text(self._own(manifest)) != text:  # else both have one disk
            remove(self._own(manifest))
            arriving.missing = set(range(len(names)))
        self._arriving[name] = arriving

    def _put(self, name: str, number: int, data: np.ndarray) -> None:
        arriving = self._arriving[name]
        file = arriving.names[number]
        if number not in arriving.missing:
            return
        content = data.tobytes()
        if record_of(content) != arriving.manifest.files[file]:
            raise ValueError(f"{file} is not what was sent")
        path = inside(self._own(arriving.manifest), file)
        make(path.parent)
        path.write_bytes(content)
        fsync(path)
        arriving.missing.discard(number)

    def _commit(self, arriving: _Arriving) -> None:
        own = self._own(arriving.manifest)
        if _text(own) != arriving.text:
            for path in (*(p for p in own.rglob("*") if p.is_dir()), own):
                fsync(path)
            replace_text(own / MANIFEST, arriving.text)
            for path in (own, own.parent, self._directory):
                fsync(path)
        self._retain(arriving)

    def _retain(self, arriving: _Arriving) -> None:
        """Keep the newest complete parts of the same worker up to this one."""
        top, worker = self._directory, arriving.manifest.worker
        steps = step_numbers(top)
        parts = {s: part_directory(top, s, worker) for s in steps}
        past = [step for step in steps if step <= arriving.manifest.step]
        complete = [step for step in past if is_complete(parts[step])]
        kept = {*complete[-self._keep :], arriving.safe}
        for step in set(steps) - kept:
            remove(parts[step])

    def _own(self, manifest: Manifest) -> Path:
        return part_directory(self._directory, manifest.step, manifest.worker)


def _text(own: Path) -> str | None:
    try:
        return (own / MANIFEST).read_text()
    except FileNotFoundError:
        return None


def _bytes(path: Path) -> np.ndarray:
    """The file's bytes, read when they are sent."""
    if not path.stat().st_size:
        return np.zeros(0, np.uint8)
    return np.memmap(path, np.uint8, "r")
