# SPDX-License-Identifier: Apache-2.0
"""Checkpoints written by Orbax to the local disk while training goes on.

Owns `Saver`: the background write, the commit (the manifest, last), retention, and
the removal of what a crash left behind. Survives `kill -9` and a full disk at any
moment: the newest committed step stays as it is. Weights that are not finite are never
committed. Does not own names (`layout.py`),
the manifest's content (`manifest.py`) nor reading (`restore.py`).
"""

import asyncio
import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from hetjax.checkpoint.disk import (
    committed,
    is_complete,
    make,
    remove,
    remove_failed,
    remove_uncommitted,
)
from hetjax.checkpoint.durable import fsync, replace_text
from hetjax.checkpoint.entry import WEIGHTS, Entry
from hetjax.checkpoint.format import (
    MANIFEST,
    STATES,
    leaf_tree,
    part_directory,
    split_leaves,
    step_numbers,
)
from hetjax.checkpoint.manifest import (
    Manifest,
    attempt,
    record,
    to_text,
)
from hetjax.checkpoint.recovery_plan import Save
from hetjax.checkpoint.replication import Copies
from hetjax.checkpoint.stores.patience import LAST_UPLOAD_S
from hetjax.checkpoint.uploader import Uploader
from hetjax.errors import BadInput

_MAX_CAUSE_CHARS = 400
_NUM_WRITERS = 16  # they mostly wait for the disk


@dataclass(frozen=True, kw_only=True, slots=True)
class _Snapshot:
    step: int
    entries: tuple[Entry, ...]
    leaves: tuple[tuple[str, np.ndarray], ...]
    host: Any
    workers: tuple[str, ...]
    safe: int | None
    is_stored: bool


class Saver:
    """Writes one worker's checkpoints, one at a time, on a thread of its own.

    `keep` is the number of newest steps that stay, beside those that `uploader` still
    copies. Only one process may save as `worker` in a directory: opening removes
    unfinished saves. The interpreter does not wait for a save at its end: use `with` or
    `close`. Raises BadInput where it cannot write.
    """

    def __init__(
        self,
        directory: Path,
        worker: str,
        keep: int = 2,
        uploader: Uploader | None = None,
        copies: Copies | None = None,
    ) -> None:
        assert keep >= 1, keep
        self.directory, self._worker, self._keep = directory, worker, keep
        self._uploader, self._copies = uploader, copies
        self.newest: Save | None = None  # that was committed, and copied
        self.spoilt: Save | None = None  # begun last, if its weights are not finite
        _open(directory)
        self._remove_unfinished()
        self._not_stored: int | None = None  # yet: a step that is committed here
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(
        self,
        step: int,
        entries: Iterable[tuple[Entry, np.ndarray]],
        host: Mapping[str, Any],
        workers: Sequence[str] = (),
        safe: int | None = None,
        is_stored: bool = True,
    ) -> bool:
        """Start saving; False, and `entries` not even asked, if a save is in flight.

        `workers` names all that save this step (default: this one alone). Step `safe`
        stays, too: the newest one that all of them have. What is not `is_stored` goes
        to the store only at the end, if no later step does.
        The arrays must not change afterwards; `host` is JSON and is copied. A save
        that fails later warns once, and training goes on.
        """
        if self.busy:
            return False
        self.wait()
        self.spoilt = None
        found = tuple(entries)
        snapshot = _Snapshot(
            step=step,
            entries=tuple(entry for entry, _ in found),
            leaves=tuple(leaf for item in found for leaf in split_leaves(*item)),
            host=json.loads(json.dumps(host)),
            workers=tuple(workers) or (self._worker,),
            safe=safe,
            is_stored=is_stored,
        )
        self._pending = self._thread.submit(self._write, snapshot)
        return True

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
        """Finish the save in flight, and its copy to the store, and stop.

        The copy has LAST_UPLOAD_S; what is not there by then is told.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._uploader is not None:
                if self._not_stored is not None:
                    self._uploader.offer(self._not_stored)
                self._uploader.hurry()
                self._uploader.wait(LAST_UPLOAD_S)
                self._uploader.close()

    def _write(self, snapshot: _Snapshot) -> None:
        own = self._own(snapshot.step)
        if _is_spoilt(snapshot):
            self.spoilt = snapshot.step, attempt(snapshot.host)
            return
        try:
            self._commit(own, snapshot)
        except Exception as error:
            remove_failed(own)
            warnings.warn(
                f"checkpoint of step {snapshot.step} was not saved "
                f"({_cause(error, own)}); training goes on, earlier ones are intact",
                stacklevel=1,
            )
            return
        self._not_stored = None if snapshot.is_stored else snapshot.step
        if self._uploader is not None and snapshot.is_stored:
            self._uploader.offer(snapshot.step)
        self._copy(own, snapshot)
        self._retain(snapshot)

    def _commit(self, own: Path, snapshot: _Snapshot) -> None:
        self._remove_unfinished()
        if committed(own) is None:
            remove(own)
        make(own)
        state = next(name for name in STATES if not (own / name).exists())
        with _checkpointer(self._worker) as checkpointer:
            checkpointer.save(own / state, args=_Save(leaf_tree(snapshot.leaves)))
        _flush(own / state)
        for name, _ in snapshot.leaves:
            assert (own / state / name / "zarr.json").exists(), f"{name} not written"
        manifest = Manifest(
            step=snapshot.step,
            worker=self._worker,
            workers=snapshot.workers,
            state=state,
            entries=snapshot.entries,
            files={str(p.relative_to(own)): record(p) for p in _files(own / state)},
            host=snapshot.host,
        )
        replace_text(own / MANIFEST, to_text(manifest))
        for path in (own, own.parent, self.directory):
            fsync(path)
        remove_uncommitted(own)

    def _copy(self, own: Path, snapshot: _Snapshot) -> None:
        try:
            if self._copies is not None:
                self._copies.copy(own, snapshot.step, snapshot.safe)
            self.newest = snapshot.step, attempt(snapshot.host)
        except OSError as error:
            warnings.warn(
                f"checkpoint of step {snapshot.step} is not on as many nodes as it "
                f"should be ({error}); training goes on, earlier ones stay",
                stacklevel=1,
            )

    def _retain(self, snapshot: _Snapshot) -> None:
        """Keep the newest complete steps up to this one.

        Later ones belong to a past that was given up by resuming before them.
        """
        past = [s for s in step_numbers(self.directory) if s <= snapshot.step]
        complete = [s for s in past if is_complete(self._own(s))]
        kept = {*complete[-self._keep :], snapshot.safe}
        if self._uploader is not None:
            kept |= self._uploader.in_flight
        try:
            for other in step_numbers(self.directory):
                if other not in kept:
                    remove(self._own(other))
        except OSError as error:
            warnings.warn(f"old checkpoint not removed: {error}", stacklevel=1)

    def _remove_unfinished(self) -> None:
        for step in step_numbers(self.directory):
            own = self._own(step)
            if not (own / MANIFEST).exists() or committed(own):
                remove_uncommitted(own)  # a damaged manifest is left to be seen

    def _own(self, step: int) -> Path:
        return part_directory(self.directory, step, self._worker)


class _Leaves(ocp.type_handlers.NumpyHandler):
    """Writes every leaf, whichever process this is, as one chunk in one file.

    Orbax has no handler that does: its NumpyHandler writes in process 0 of a JAX world
    alone, and its ArrayHandler refuses arrays of one process of several. It also makes
    three folders per leaf where one will do: a save takes 1.03, 0.80 and 1.61 times
    as long with NumpyHandler, for 127 leaves of 3 MB together, 205 of 205 MB and 939
    of 20 MB (medians of 7, 5 and 4 alternating rounds, ext4, two cores).
    """

    async def serialize(
        self,
        values: Sequence[np.ndarray],
        infos: Sequence[Any],
        args: Sequence[Any] | None = None,
    ) -> list[Any]:
        for info in infos:
            await info.await_path_creation()
        context = ts.Context({"file_io_concurrency": {"limit": _NUM_WRITERS}})
        opened = (
            ts.open(
                _zarr(f"{info.parent_dir / info.name}/", value),
                create=True,
                context=context,
            )
            for info, value in zip(infos, values, strict=True)
        )
        arrays = zip(await asyncio.gather(*opened), values, strict=True)
        await asyncio.gather(
            *(
                a.write(v, can_reference_source_data_indefinitely=True)
                for a, v in arrays
            )
        )
        return []


def _zarr(path: str, value: np.ndarray) -> dict[str, Any]:
    flat = {"separator": "."}  # no folder within a leaf's: each takes time
    grid = {"name": "regular", "configuration": {"chunk_shape": value.shape}}
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": path},
        "store_data_equal_to_fill_value": True,  # or Orbax misses a file
        "metadata": {
            "shape": value.shape,
            "data_type": value.dtype.name,
            "chunk_grid": grid,
            "chunk_key_encoding": {"name": "default", "configuration": flat},
        },
    }


class _Tree(ocp.PyTreeCheckpointHandler):
    """Orbax's handler of trees, for one directory per leaf."""

    def finalize(self, directory: Path) -> None:
        """Merge nothing: OCDBT's files are what Orbax would look for, and miss."""


@ocp.args.register_with_handler(_Tree, for_save=True, for_restore=True)
class _Save(ocp.args.PyTreeSave):
    """What `_Tree` saves."""


def _checkpointer(worker: str) -> ocp.Checkpointer:
    """Orbax for this process alone: no barrier, no collective, no second copy.

    Synchronous, on a thread of ours, which has to flush, checksum and commit anyway.
    Orbax's AsyncCheckpointer would first hold up training for its records of all
    leaves: for 29, 37 and 229 ms with 127, 205 and 1,867 leaves, where `Saver.save`
    takes 0.4, 1.3 and 4.6 (medians of 5 alternating rounds, two cores).
    """
    process = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process,
        active_processes={process},
        barrier_sync_key_prefix=worker,
    )
    handler = _Tree(
        use_ocdbt=False,  # one directory per leaf: mergeable, fetched one by one
        use_zarr3=True,
        use_compression=False,  # zstd is several times slower than the disk
        multiprocessing_options=alone,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (np.ndarray, _Leaves()),
            (jax.Array, ocp.type_handlers.ArrayHandler()),  # asked for, never used
        ),
    )
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _open(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".writable"
        probe.touch()
        probe.unlink(missing_ok=True)  # of two that open it, one is first
    except OSError as error:
        raise BadInput(
            got=f"checkpoint directory {directory} cannot be used ({error.strerror})",
            allowed="a folder that you may write to, or a path where one can be made",
            fix="choose another one with --run-dir",
        ) from error


def _is_spoilt(snapshot: _Snapshot) -> bool:
    """Whether a weight is not finite: a sum of them, in double precision, is not."""
    return any(
        not np.isfinite(np.sum(value, dtype=np.float64))
        for name, value in snapshot.leaves
        if name.startswith(WEIGHTS)
    )


def _files(root: Path) -> list[Path]:
    return sorted(Path(at, name) for at, _, names in os.walk(root) for name in names)


def _flush(state: Path) -> None:
    """fsync what TensorStore does not: Orbax's own files, and directories of others.

    Several at a time: alone, each would wait for the disk's journal. TensorStore syncs
    a file and then its directory, which is enough for directories of files alone.
    """
    paths = {state.parent, state, *(path for path in state.iterdir() if path.is_file())}
    paths |= {Path(at) for at, below, _ in os.walk(state) if below}
    with ThreadPoolExecutor(_NUM_WRITERS) as pool:
        list(pool.map(fsync, paths))


def _cause(error: Exception, own: Path) -> str:
    text = f"{type(error).__name__}: {error}".replace(f"{own}/", "")
    return text.splitlines()[0][:_MAX_CAUSE_CHARS]
