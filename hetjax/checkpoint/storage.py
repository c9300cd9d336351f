# SPDX-License-Identifier: Apache-2.0
"""Defines where a run keeps its checkpoints: on which disks, in which store, how many.

Owns the settings that all workers of a run share, their form on a machine that does not
see the run's directory, opening what they describe, and which store a URL means. Does
not own writing (`writer.py`), uploading (`uploader.py`) nor the stores themselves
(`stores/`).
"""

import errno
import math
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from hetjax.checkpoint.leases.lease import (
    Fence,
    Lease,
    LeaseHeld,
    acquire,
    holder_of,
    is_free,
    last_number,
)
from hetjax.checkpoint.leases.lease_holder import HeldFor
from hetjax.checkpoint.replication import PeerReplication
from hetjax.checkpoint.run_identity import UNIDENTIFIED, RunIdentity
from hetjax.checkpoint.signing import read_key
from hetjax.checkpoint.stores.endpoint import S3, endpoint_problems
from hetjax.checkpoint.stores.local import FileStore, open_directory
from hetjax.checkpoint.stores.store import BandwidthLimit, Store, TimeLimitedStore
from hetjax.checkpoint.uploader import Uploader
from hetjax.checkpoint.writer import (
    CheckpointWriter,
    check_writable,
    not_writable,
)
from hetjax.errors import BadInput
from hetjax.names import inside

_MOST_WAITS = 32  # threads that wait for leases of workers
LEASES = ".leases"  # in a checkpoint folder, by worker
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointStorage:
    """Where checkpoints go and how many of them stay.

    `directory` is a path on each worker's host, in which `{worker}` stands for its
    name: one folder shared by all, or a local disk of each. `cloud` is the URL of the
    store for uploads (see `open_store`), or None. `endpoint` is the URL of its server,
    if it is not the provider's. `copies` is the number of nodes that have each slice on
    their disks.

    `lease` is the folder of the run's lease, `number` that lease's number, and
    `store_number` the number of the store's lease. Writes carry these numbers and stop
    once the lease is over (0: no check). Manifests are signed with the key in
    `key_file`; others are refused. They carry the identity of `run`; those of other
    runs are not used (None: any run is accepted).

    `home` names the run's directory. If the checkpoint folders are outside it
    (`is_local`), each has its own lease. `token` is that of the run's lease holder, by
    which a machine tells whether it sees the run's directory (empty: all machines do).
    If some do not, `copies_apart` replaces `copies`.
    """

    directory: str
    keep: int = 2
    copies: int = 1
    cloud: str | None = None
    endpoint: str | None = None
    upload_mbit_per_s: float | None = None
    lease: str = ""
    number: int = 0
    store_number: int = 0
    key_file: str | None = None
    run: RunIdentity | None = None
    home: str = ""
    is_local: bool = False
    token: str = ""
    copies_apart: int = 1

    def apart(self) -> "CheckpointStorage":
        """Return the storage of a run if some machines do not see its directory."""
        return replace(self, copies=self.copies_apart)

    def here(self) -> "CheckpointStorage":
        """Return the storage as it is on this machine.

        If the machine does not see the run's directory, checkpoints go to a folder of
        the run on the machine's own disk, unless a folder was given. The unseen lease
        then fences nothing.
        """
        if not self.token or sees_lease(self.lease, self.number, self.token):
            return self
        unseen = replace(self, lease="", number=0, token="", is_local=True)
        if self.is_local:
            return unseen
        run = UNIDENTIFIED if self.run is None else self.run.id
        return replace(unseen, directory=str(state_folder(run or "unidentified")))

    def at(self, worker: str) -> Path:
        """Return the folder on its host in which this worker saves."""
        return Path(self.directory.replace("{worker}", worker))

    def store(self, is_tried: bool = True) -> Store | None:
        """Return the store, or None; raises BadInput if it cannot be used.

        If not `is_tried`, an unusable store raises OSError later, when it is used.
        """
        if self.cloud is None:
            return None
        limit = self.upload_mbit_per_s
        bytes_per_s = math.inf if limit is None else limit * 1e6 / 8
        return open_store(self.cloud, bytes_per_s, is_tried, self.endpoint)

    def hold(self, worker: str) -> Lease | None:
        """Take the lease on this worker's folder, if it has one; raises LeaseHeld.

        Each worker has its own lease, as processes start and end independently. A lease
        of another run keeps out all of them. If the disk is full or read-only, warns
        and returns None: training continues. Raises BadInput if the folder cannot be
        written for another reason.
        """
        if not (self.is_local and self.home):
            return None
        run = UNIDENTIFIED if self.run is None else self.run.id
        held_for = HeldFor(run=run, home=self.home, succeeds=True)
        folder = self.at(worker)
        check_writable(folder)
        where = f"checkpoint folder {str(folder)!r}"
        own = lease_folder(folder / LEASES / worker)
        try:
            lease = _take_first(own, where, held_for)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise not_writable(folder, error) from error
            _warn(
                f"{where} could not be leased, so another run may use it: "
                f"{error.strerror}"
            )
            return None
        try:
            _take_over_others(folder / LEASES, worker, where, held_for)
        except BaseException:
            lease.release()
            raise
        return lease

    def writer(
        self,
        worker: str,
        copies: PeerReplication | None = None,
        held: Lease | None = None,
    ) -> CheckpointWriter:
        """Return the writer of this worker; `copies` replicates its saves to peers.

        `held` is the lease on its folder, if it has one.
        """
        # a temporarily unreachable store must not prevent saving
        directory, store, uploader = self.at(worker), self.store(is_tried=False), None
        if store is not None:
            fence = Fence(store, f"checkpoint store {store}", self.store_number)
            uploader = Uploader(
                store,
                directory,
                worker,
                keep=self.keep,
                fence=fence,
                key=self.key(),
                run=self.run,
            )
        return CheckpointWriter(
            directory,
            worker,
            keep=self.keep,
            uploader=uploader,
            copies=copies,
            fence=self._fence(held),
            key=self.key(),
            run=self.run,
        )

    def key(self) -> bytes | None:
        """Return the run's key, if it has one; BadInput if the key is not here."""
        return None if self.key_file is None else read_key(Path(self.key_file))

    def _fence(self, held: Lease | None) -> Fence | None:
        """Return the fence of the run's lease, combined with that of `held`.

        On a machine that does not see the run's directory, only the latter applies.
        """
        beside = None if held is None else held.fence
        if not self.lease:
            return beside
        where = f"run directory {str(Path(self.lease).parent)!r}"
        return Fence(lease_folder(Path(self.lease)), where, self.number, beside)


@cache
def sees_lease(folder: str, number: int, token: str) -> bool:
    """Return whether this machine sees lease `number` of holder `token` in the folder.

    The first answer is cached, as it must not change while a process writes. A lease
    that cannot be read is not seen.
    """
    try:
        if not Path(folder).is_dir():
            return False
        holder = holder_of(lease_folder(Path(folder)), number)
    except OSError:
        return False
    return holder is not None and holder.token == token


def state_folder(run: str) -> Path:
    """Return this machine's checkpoint folder of a run whose directory it cannot see.

    It is $XDG_STATE_HOME/hetjax/RUN, by default in ~/.local/state.
    """
    variable = os.environ.get("XDG_STATE_HOME", "")
    home = Path(variable) if os.path.isabs(variable) else Path.home() / ".local/state"
    return inside(home / "hetjax", run)


def _take_first(store: Store, where: str, held_for: HeldFor) -> Lease:
    """Take a worker's lease, even if another worker of the run ended the old one."""
    try:
        return acquire(store, where, _warn, held_for=held_for)
    except LeaseHeld:
        if not _is_ours(store, held_for):
            raise
    return acquire(store, where, _warn, held_for=held_for)


def _take_over_others(leases: Path, worker: str, where: str, held_for: HeldFor) -> None:
    """Wait until no other run's worker holds the folder, and end all their leases.

    A worker that hung then writes no more, and the next start need not wait. Waits for
    all leases at once. Raises LeaseHeld.
    """
    others = [lease_folder(one) for one in leases.iterdir() if one.name != worker]
    held = [one for one in others if not (_is_ours(one, held_for) or is_free(one))]
    if not held:
        return
    with ThreadPoolExecutor(min(len(held), _MOST_WAITS)) as pool:
        list(pool.map(lambda store: _take_over(store, where, held_for), held))


def _take_over(store: Store, where: str, held_for: HeldFor) -> None:
    try:
        acquire(store, where, _warn, held_for=held_for).release()
    except LeaseHeld:
        if not _is_ours(store, held_for):  # if ours: that worker restarted
            raise
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise


def _is_ours(store: Store, held_for: HeldFor) -> bool:
    """Return whether a worker of this run directory took the lease last."""
    holder = holder_of(store, last_number(store))
    return holder is not None and holder.home == held_for.home


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)


def lease_folder(path: Path) -> Store:
    """Return a folder as a store for a lease."""
    return TimeLimitedStore(FileStore(path, needs_links=False))


def open_store(
    url: str,
    bytes_per_s: float = math.inf,
    is_tried: bool = True,
    endpoint: str | None = None,
) -> Store:
    """Open the store of a URL, and try it out if `is_tried`.

    The URL is `gs://bucket/prefix`, `s3://bucket/prefix`, `file:///path` or a plain
    path. `bytes_per_s` limits uploads, `endpoint` is a server that speaks S3. Raises
    BadInput if the URL has another form, or if the trial cannot write there.
    """
    for problem in endpoint_problems(url, endpoint):
        raise problem
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
    if url.startswith(S3):
        return _open_s3(url, limit, endpoint, is_tried)
    path = unquote(rest) if found else url
    if not path or (found and (scheme != "file" or not path.startswith("/"))):
        raise BadInput(
            got=f"checkpoint store {url!r}",
            allowed="gs://BUCKET/PREFIX, s3://BUCKET/PREFIX, file:///PATH or the path "
            "of a folder",
            fix="write it like gs://my-bucket/my-run or /mnt/shared/my-run",
        )
    return open_directory(Path(path).absolute(), limit, is_tried)


def _open_s3(
    url: str, limit: BandwidthLimit, endpoint: str | None, is_tried: bool
) -> Store:
    try:
        from hetjax.checkpoint.stores.s3_opening import open_bucket
    except ModuleNotFoundError as error:
        if error.name not in ("obstore", "botocore"):
            raise
        raise BadInput(
            got=f"checkpoint store {url}, but the package {error.name} is missing",
            allowed="S3 stores if obstore and botocore are installed on every machine "
            "of the run",
            fix="pip install 'hetjax[s3]'",
        ) from error
    return open_bucket(url, limit, endpoint, is_tried)
