# SPDX-License-Identifier: Apache-2.0
"""A worker's checkpoints as its controller asks for them.

Owns what saves and what keeps copies for others, made when they are first needed. Does
not own writing (`hetjax/checkpoint/writer.py`) nor requests of other kinds
(`serving.py`).
"""

from collections.abc import Callable, Iterable

import numpy as np

from hetjax.checkpoint.format import Entry
from hetjax.checkpoint.replication import PeerReplication
from hetjax.checkpoint.writer import CheckpointWriter
from hetjax.runtime.rpc.schema import (
    Address,
    AwaitSaved,
    KeepCopies,
    SaveState,
    SavingState,
    SendCopies,
)


class Saving:
    """Saves as `name`; `open_copies` makes what keeps copies for others."""

    def __init__(self, name: str, open_copies: Callable[[], PeerReplication]) -> None:
        self._name, self._open_copies = name, open_copies
        self._saver: CheckpointWriter | None = None
        self._copies: PeerReplication | None = None

    def state(self, saves: bool) -> SavingState:
        """How saving goes; `saves`: whether there is anything to save here."""
        if self._saver is None:
            return SavingState(saves=saves)
        return SavingState(
            saves=saves,
            busy=self._saver.busy,
            storing=self._saver.is_storing,
            newest=self._saver.newest,
            spoilt=self._saver.not_finite,
        )

    def keep_copies(self, request: KeepCopies) -> Address:
        """Be ready to keep copies for others, where this one's own parts go."""
        if self._copies is None:
            self._copies = self._open_copies()
        self._copies.store_in(request.storage.at(self._name), request.storage.keep)
        return Address(address=self._copies.address)

    def send_copies(self, request: SendCopies) -> None:
        assert self._copies is not None, "keep copies first"
        self._copies.send_to(request.to)

    def save(
        self, request: SaveState, entries: Iterable[tuple[Entry, np.ndarray]]
    ) -> None:
        """Start a save, if this worker is among those that do."""
        if self._name not in request.workers:
            return
        if self._saver is None:
            self._saver = request.storage.writer(self._name, self._copies)
        started = self._saver.save(
            request.step,
            entries,
            request.host,
            request.workers,
            request.safe,
            request.is_stored,
        )
        assert started, "the controller asks who is busy first"

    def wait(self, request: AwaitSaved) -> None:
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()
        if self._copies is not None:
            self._copies.close()
