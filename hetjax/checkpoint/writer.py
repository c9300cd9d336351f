# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints with Orbax to the local disk while training continues.

Owns the background write, the commit (the manifest is written last), retention, and the
cleanup after a crash. A `kill -9` or a full disk at any moment leaves the newest
committed step intact. Weights that are not finite are never committed. Does not own the
format (`format.py`) nor reading (`reader.py`).
"""

import json
import os
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hetjax.checkpoint.disk import (
    fsync,
    has_been_overtaken,
    make_directory,
    read_manifest,
    remove_after,
    remove_failed,
    remove_part,
    remove_uncommitted,
    replace_text,
    retain,
)
from hetjax.checkpoint.file_records import FileRecord, record_of_file
from hetjax.checkpoint.format import (
    EARLIER,
    MANIFEST,
    STATES,
    WEIGHTS,
    Entry,
    Manifest,
    attempt,
    leaf_tree,
    part_directory,
    read_manifest_text,
    split_leaves,
    step_numbers,
    to_text,
)
from hetjax.checkpoint.leases.lease import Fence, LeaseLost
from hetjax.checkpoint.orbax_leaves import NUM_WRITERS, SaveTree, checkpointer_alone
from hetjax.checkpoint.recovery_plan import Save
from hetjax.checkpoint.replication import PeerReplication
from hetjax.checkpoint.run_identity import UNIDENTIFIED, RunIdentity, named
from hetjax.checkpoint.stores.store import LAST_UPLOAD_S
from hetjax.checkpoint.uploader import Uploader
from hetjax.errors import BadInput
from hetjax.files.parsing import json_value

_MAX_CAUSE_CHARS = 400
_OVERTAKEN = "a later start of this worker has saved meanwhile"
_Leaves = Sequence[tuple[str, np.ndarray]]


class CheckpointWriter:
    """Writes one worker's checkpoints, one at a time, on its own thread.

    The newest `keep` steps stay, and those that `uploader` is still uploading. Only one
    process may save as `worker` in a directory, because opening it removes unfinished
    saves. The interpreter does not wait for a save when it exits: use `with` or
    `close`. Nothing is committed once the lease of `fence` is over. Manifests are
    signed with `key` and carry the identity of `run`. Raises BadInput if the directory
    is not writable, or holds a save of another run.
    """

    def __init__(
        self,
        directory: Path,
        worker: str,
        keep: int = 2,
        uploader: Uploader | None = None,
        copies: PeerReplication | None = None,
        fence: Fence | None = None,
        key: bytes | None = None,
        run: RunIdentity | None = None,
    ) -> None:
        assert keep >= 1, keep
        self.directory, self._worker, self._keep = directory, worker, keep
        self._uploader, self._copies, self._fence = uploader, copies, fence
        self._key, self._run = key, run
        self.newest: Save | None = None  # committed and replicated
        self.not_finite: Save | None = None  # the last save, if its weights were not
        check_writable(directory)
        if run is not None:
            _refuse_others(directory, worker, run)
        self._remove_unfinished()
        self._waits_for_upload: int | None = None  # committed here, not enqueued
        self._keeps_all, self._removing = False, threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(
        self,
        step: int,
        entries: Iterable[tuple[Entry, np.ndarray]],
        *,
        host: Mapping[str, Any],
        workers: Sequence[str] = (),
        safe: Save | None = None,
        best: int | None = None,
        uploads_now: bool = True,
    ) -> bool:
        """Start saving; False, without reading `entries`, if a save is in flight.

        `workers` names all workers that save this step (default: this one alone). Save
        `safe`, the newest that all of them have, and step `best` are kept as well.
        Unless it `uploads_now`, a step is uploaded only at the end of the run, if no
        later one was saved. The arrays must not change afterwards; `host` is JSON and
        is copied. A save that fails later warns once, and training continues.
        """
        if self.busy:
            return False
        self.wait()
        self.not_finite, self._keeps_all = None, False
        found = tuple(entries)
        leaves = [leaf for item in found for leaf in split_leaves(*item)]
        manifest = Manifest(
            step=step,
            worker=self._worker,
            workers=tuple(workers) or (self._worker,),
            entries=tuple(entry for entry, _ in found),
            host=json_value(json.dumps(host), finite=False),
            run=UNIDENTIFIED if self._run is None else self._run.id,
        )
        write = self._thread.submit(
            self._write, manifest, leaves, safe, best, uploads_now
        )
        self._pending = write
        if self._uploader is not None:
            self._uploader.keep_also(best, safe and safe[0])
        return True

    def keep_all(self) -> None:
        """Remove no save until the next save begins: other workers rely on them.

        After a loss, the saves that a save in flight would replace may be the only
        ones.
        """
        with self._removing:
            self._keeps_all = True

    def discard_after(self, step: int) -> None:
        """Discard later steps: remove them here, also copies for peers.

        In the store they no longer count. Raises LeaseLost.
        """
        self.wait()
        if self._fence is not None:
            self._fence.check()
        if self.newest is not None and self.newest[0] > step:
            self.newest = None
        if self._waits_for_upload is not None and self._waits_for_upload > step:
            self._waits_for_upload = None
        if self._uploader is not None:
            self._uploader.discard_after(step)
        try:
            remove_after(self.directory, step, self._run)
        except OSError as error:
            warnings.warn(f"discarded steps were not removed: {error}", stacklevel=2)

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._pending is not None and not self._pending.done()

    @property
    def is_storing(self) -> bool:
        """Whether a step is on its way to the store."""
        return self._uploader is not None and bool(self._uploader.in_flight)

    def wait(self) -> None:
        """Return once no save is in flight."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Finish the save in flight and its upload, and stop.

        The upload may take LAST_UPLOAD_S; then a warning names what is missing.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._uploader is not None:
                if self._waits_for_upload is not None:
                    self._uploader.enqueue(self._waits_for_upload)
                self._uploader.lift_limit()
                self._uploader.wait(LAST_UPLOAD_S)
                self._uploader.close()

    def _write(
        self,
        manifest: Manifest,
        leaves: _Leaves,
        safe: Save | None,
        best: int | None,
        uploads_now: bool,
    ) -> None:
        step = manifest.step
        also = frozenset(s for s in (safe and safe[0], best) if s is not None)
        if not _is_finite(leaves):
            self.not_finite = _save_of(manifest)
            return
        part = self._part(step)
        if why := self._why_not(manifest):  # spares its unfinished files
            warnings.warn(f"step {step} was not saved: {why}", stacklevel=1)
            return
        try:
            self._commit(part, manifest, leaves, safe)
        except Exception as error:
            remove_failed(part)
            warnings.warn(
                f"checkpoint of step {step} was not saved ({_cause(error, part)}); "
                "training continues, earlier ones are intact",
                stacklevel=1,
            )
            return
        self._waits_for_upload = None if uploads_now else step
        if self._uploader is not None and uploads_now:
            self._uploader.enqueue(step)
        self._replicate(part, manifest, also)
        with self._removing:
            if not self._keeps_all:
                self._retain(step, also)

    def _retain(self, step: int, also: frozenset[int]) -> None:
        in_flight = () if self._uploader is None else self._uploader.in_flight
        try:
            retain(self.directory, self._worker, step, self._keep, {*also, *in_flight})
        except OSError as error:
            warnings.warn(f"old checkpoint not removed: {error}", stacklevel=1)

    def _commit(
        self, part: Path, manifest: Manifest, leaves: _Leaves, safe: Save | None
    ) -> None:
        self._let_go_of_earlier(safe)
        self._remove_unfinished()
        before = read_manifest(part)
        if before is None:
            remove_part(part)
        make_directory(part)
        state = next(name for name in STATES if not (part / name).exists())
        with checkpointer_alone(self._worker) as checkpointer:
            checkpointer.save(part / state, args=SaveTree(leaf_tree(leaves)))
        _flush(part / state)
        for name, _ in leaves:
            assert (part / state / name / "zarr.json").exists(), f"{name} not written"
        whole = replace(manifest, state=state, files=self._records(part, state))
        if why := self._why_not(manifest):
            raise OSError(why)
        undo = partial(remove_part, part)
        if before and _save_of(before) == safe and len(manifest.workers) > 1:
            replace_text(part / EARLIER, read_manifest_text(part / MANIFEST))
            fsync(part)
        with nullcontext() if self._fence is None else self._fence.around(undo):
            replace_text(part / MANIFEST, to_text(whole, self._key))
        for path in (part, part.parent, self.directory):
            fsync(path)
        remove_uncommitted(part)

    def _why_not(self, manifest: Manifest) -> str | None:
        """Return why nothing may be saved: after a hang, another process took over."""
        own = attempt(manifest.host)
        if not has_been_overtaken(self.directory, self._worker, own):
            return None
        try:
            if self._fence is not None:
                self._fence.check()
        except (LeaseLost, OSError) as error:
            return str(error)
        return _OVERTAKEN

    def _replicate(self, part: Path, manifest: Manifest, also: frozenset[int]) -> None:
        try:
            if self._copies is not None:
                self._copies.replicate(part, manifest.step, also)
            self.newest = _save_of(manifest)
        except OSError as error:
            warnings.warn(
                f"checkpoint of step {manifest.step} is on fewer nodes than it "
                f"should be ({error}); training continues, earlier ones stay",
                stacklevel=1,
            )

    def _let_go_of_earlier(self, safe: Save | None) -> None:
        """Remove each earlier manifest whose save is not `safe`."""
        for step in step_numbers(self.directory):
            earlier = read_manifest(self._part(step), EARLIER)
            if earlier is not None and _save_of(earlier) != safe:
                (self._part(step) / EARLIER).unlink()

    def _remove_unfinished(self) -> None:
        """Remove unfinished saves.

        What an earlier process is still writing is removed at the next save.
        """
        for step in step_numbers(self.directory):
            part = self._part(step)
            if not (part / MANIFEST).exists() or read_manifest(part):
                with suppress(OSError):
                    remove_uncommitted(part)  # a damaged manifest stays visible

    def _records(self, part: Path, state: str) -> dict[str, FileRecord]:
        """Return the record of each file of the state, by its path within the part."""
        walk = os.walk(part / state)
        files = sorted(Path(at, name) for at, _, names in walk for name in names)
        signs = self._key is not None
        return {
            str(path.relative_to(part)): record_of_file(path, with_digest=signs)
            for path in files
        }

    def _part(self, step: int) -> Path:
        return part_directory(self.directory, step, self._worker)


def _save_of(manifest: Manifest) -> Save:
    return manifest.step, attempt(manifest.host)


def check_writable(directory: Path) -> None:
    """Make the folder if it is missing; BadInput if it is not writable."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".writable"
        probe.touch()
        probe.unlink(missing_ok=True)  # another process may have removed it
    except OSError as error:
        raise not_writable(directory, error) from error


def not_writable(directory: Path, error: OSError) -> BadInput:
    return BadInput(
        got=f"checkpoint directory {directory} cannot be used "
        f"({error.strerror or error})",
        allowed="a folder that you may write to, or a path where one can be made",
        fix="choose another one with --run-dir or, if it was given, --checkpoint.local",
    )


def _refuse_others(directory: Path, worker: str, run: RunIdentity) -> None:
    """Raise BadInput if a save of another run would be overwritten or removed."""
    for step in step_numbers(directory):
        found = read_manifest(part_directory(directory, step, worker))
        if found is not None and not run.owns(found.run):
            raise BadInput(
                got=f"checkpoint folder {directory}, which holds step {step} of "
                f"{named(found.run)}; this is {named(run.id)}",
                allowed="a folder that is empty, or holds this run's checkpoints",
                fix="give another --checkpoint.local, or remove what is there",
            )


def _is_finite(leaves: _Leaves) -> bool:
    """Return whether all weights are finite: then their sum in double precision is."""
    return all(
        np.isfinite(np.sum(value, dtype=np.float64))
        for name, value in leaves
        if name.startswith(WEIGHTS)
    )


def _flush(state: Path) -> None:
    """Sync what TensorStore does not: Orbax's own files, and folders of folders.

    TensorStore syncs each file and then its folder. Several syncs run at a time, since
    each waits for the disk's journal.
    """
    paths = {state.parent, state, *(path for path in state.iterdir() if path.is_file())}
    paths |= {Path(at) for at, below, _ in os.walk(state) if below}
    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        list(pool.map(fsync, paths))


def _cause(error: Exception, part: Path) -> str:
    text = f"{type(error).__name__}: {error}".replace(f"{part}/", "")
    return text.splitlines()[0][:_MAX_CAUSE_CHARS]
