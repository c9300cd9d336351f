# SPDX-License-Identifier: Apache-2.0
"""Where a run keeps its checkpoints: on which disks, in which store, how many of them.

Owns the settings that all workers of a run share, opening what they describe, and which
store a URL means. Does not own writing (`writer.py`), uploading (`uploader.py`) nor the
stores themselves (`stores/`).
"""

import math
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from hetjax.checkpoint.lease import Fence
from hetjax.checkpoint.replication import PeerReplication
from hetjax.checkpoint.signing import read_key
from hetjax.checkpoint.stores.local import FileStore, open_directory
from hetjax.checkpoint.stores.store import BandwidthLimit, Store, TimeLimitedStore
from hetjax.checkpoint.uploader import Uploader
from hetjax.checkpoint.writer import CheckpointWriter
from hetjax.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointStorage:
    """Where checkpoints go and how many of them stay.

    `directory` is a path on each worker's host, in which `{worker}` stands for its
    name: one folder shared by all, or a local disk of each. `cloud` is the URL of a
    store that they are uploaded to (see `open_store`), or None. `copies` is the number
    of nodes that have each slice on their disks. `lease` is the folder of the run's
    lease, `number` its number and `store_number` that of the store's: what is written
    carries them, and is not written once they are over (0: nobody looks).
    Manifests are signed with the key in `key_file`, and no others are believed.
    """

    directory: str
    keep: int = 2
    copies: int = 1
    cloud: str | None = None
    upload_mbit_per_s: float | None = None
    lease: str = ""
    number: int = 0
    store_number: int = 0
    key_file: str | None = None

    def at(self, worker: str) -> Path:
        """The folder on its host in which this worker saves."""
        return Path(self.directory.replace("{worker}", worker))

    def store(self, is_tried: bool = True) -> Store | None:
        """The store, or None; raises BadInput if it cannot be used.

        One that is not tried out raises OSError later, where it is used.
        """
        if self.cloud is None:
            return None
        limit = self.upload_mbit_per_s
        bytes_per_s = math.inf if limit is None else limit * 1e6 / 8
        return open_store(self.cloud, bytes_per_s, is_tried)

    def writer(
        self, worker: str, copies: PeerReplication | None = None
    ) -> CheckpointWriter:
        """The writer of this worker; `copies` replicates what it saves to peers."""
        # a store that is not there for a while must not keep anybody from saving
        directory, store, uploader = self.at(worker), self.store(is_tried=False), None
        if store is not None:
            fence = Fence(store, f"checkpoint store {store}", self.store_number)
            uploader = Uploader(
                store, directory, worker, keep=self.keep, fence=fence, key=self.key()
            )
        return CheckpointWriter(
            *(directory, worker, self.keep, uploader, copies, self._fence(), self.key())
        )

    def key(self) -> bytes | None:
        """The run's key, if it has one; BadInput if that is not here."""
        return None if self.key_file is None else read_key(Path(self.key_file))

    def _fence(self) -> Fence | None:
        """The run's; on a machine that does not see its directory it holds nobody."""
        if not self.lease:
            return None
        where = f"run directory {str(Path(self.lease).parent)!r}"
        return Fence(lease_folder(Path(self.lease)), where, self.number)


def lease_folder(path: Path) -> Store:
    """A folder as a store for a lease."""
    return TimeLimitedStore(FileStore(path, needs_links=False))


def open_store(url: str, bytes_per_s: float = math.inf, is_tried: bool = True) -> Store:
    """The store at `gs://bucket/prefix`, `file:///path` or a plain path, tried out.

    `bytes_per_s` limits uploads. Raises BadInput where the URL is not one of these, or
    nothing can be written there, if that is tried.
    """
    if bytes_per_s <= 0:
        raise BadInput(
            got=f"an upload limit of {bytes_per_s} bytes per second",
            allowed="more than 0, or no limit",
            fix="give a positive number, or leave the limit out",
        )
    limit = BandwidthLimit(bytes_per_s)
    scheme, found, rest = url.partition("://")
    if found and scheme == "gs":
        # imported only here, as it takes a second
        from hetjax.checkpoint.stores.gcs import open_bucket

        bucket, _, prefix = rest.partition("/")
        return open_bucket(bucket, prefix.strip("/"), limit, is_tried)
    path = unquote(rest) if found else url
    if not path or (found and (scheme != "file" or not path.startswith("/"))):
        raise BadInput(
            got=f"checkpoint store {url!r}",
            allowed="gs://BUCKET/PREFIX, file:///PATH or the path of a folder",
            fix="write it like gs://my-bucket/my-run or /mnt/shared/my-run",
        )
    return open_directory(Path(path).absolute(), limit, is_tried)
