# SPDX-License-Identifier: Apache-2.0
"""Where a run's checkpoints are: on which disks, in which store, how many of them.

Owns the settings that all workers of a run share, and what they make of them. Does not
own writing (`save.py`) nor copying (`upload.py`).
"""

from dataclasses import dataclass
from pathlib import Path

from hetjax.checkpoint.replication import Copies
from hetjax.checkpoint.stores.local import open_store
from hetjax.checkpoint.stores.store import Store
from hetjax.checkpoint.uploader import Uploader
from hetjax.checkpoint.writer import Saver


@dataclass(frozen=True, kw_only=True, slots=True)
class Keeping:
    """Where checkpoints go and how many of them stay.

    `directory` is a path on the host of each worker, in which `{worker}` stands for its
    name; it may be the same folder for all or a local disk of each. `cloud` is a store
    that they are copied to (`store.open_store`), or None; `copies` is how many nodes
    are to have each slice on their disks.
    """

    directory: str
    keep: int = 2
    copies: int = 1
    cloud: str | None = None
    upload_mbit_per_s: float | None = None

    def at(self, worker: str) -> Path:
        """The folder of what this worker saves, on its host."""
        return Path(self.directory.replace("{worker}", worker))

    def store(self) -> Store | None:
        """The store; raises BadInput where it cannot be used."""
        if self.cloud is None:
            return None
        limit = self.upload_mbit_per_s
        return open_store(self.cloud, None if limit is None else limit * 1e6 / 8)

    def saver(self, worker: str, copies: Copies | None = None) -> Saver:
        """What saves as this worker, with copies on the disks of others."""
        directory, store, uploader = self.at(worker), self.store(), None
        if store is not None:
            uploader = Uploader(store, directory, worker, keep=self.keep)
        return Saver(directory, worker, self.keep, uploader, copies)
