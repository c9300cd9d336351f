# SPDX-License-Identifier: Apache-2.0
"""Uploads local checkpoints to a store in the background.

Owns `Uploader`: one worker's thread, and its retention in the store. Does not own the
names of objects and COMMIT (`stored_steps.py`), the storage of objects (`stores/`) nor
the local files (`writer.py`).
"""

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from hetjax.checkpoint.format import MANIFEST, Manifest, from_text, part_directory
from hetjax.checkpoint.leases.lease import Fence, LeaseLost
from hetjax.checkpoint.other_runs import saved_by
from hetjax.checkpoint.run_identity import RunIdentity
from hetjax.checkpoint.stored_steps import (
    COMMIT,
    commit,
    committed_lease,
    object_name,
    stored_steps,
)
from hetjax.checkpoint.stores.store import Conflict, Store

_GRACE_S = 2.0
_T = TypeVar("_T")


class Uploader:
    """Uploads one worker's committed steps, the newest first.

    A waiting step is skipped once a newer one is enqueued. A failed upload warns once,
    and training continues. The store keeps the newest `keep` committed steps and those
    of `keep_also`. An older one is removed only after a newer COMMIT is in place, and
    only this worker's files of it. Once the lease of `fence` is over, nothing is
    written or removed any more. COMMIT is signed with `key`; `read_text` reads
    manifests on the local disk. Saves of runs other than `run` stay untouched (None:
    all belong to one run).
    """

    def __init__(
        self,
        store: Store,
        directory: Path,
        worker: str,
        num_threads: int = 8,
        keep: int = 2,
        fence: Fence | None = None,
        key: bytes | None = None,
        read_text: Callable[[Path], str] = Path.read_text,
        run: RunIdentity | None = None,
    ) -> None:
        self._read_text, self._own_run = read_text, run
        self._fence, self._key = fence or Fence(store, str(store), 0), key
        assert num_threads >= 1 and keep >= 1, (num_threads, keep)
        self._store, self._directory, self._worker = store, directory, worker
        self._num_threads, self._keep = num_threads, keep
        self._changed = threading.Condition()
        self._waiting: int | None = None
        self._uploading: int | None = None
        self._uploaded: set[int] = set()  # by this run, without discarded steps
        self._most = -1  # later steps are discarded
        self._also: tuple[int | None, int | None] = None, None
        self._closed = False
        # A daemon: an unresponsive store must not delay the program's exit.
        self._thread = threading.Thread(target=self._run, daemon=True, name="upload")
        self._thread.start()

    def __enter__(self) -> "Uploader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def enqueue(self, step: int) -> None:
        """Upload a step that is committed on the local disk; returns at once.

        A step before the last one means that the run was rolled back.
        """
        with self._changed:
            assert not self._closed, "the uploader is closed"
            self._waiting, self._most = step, step
            self._uploaded = {other for other in self._uploaded if other < step}
            self._changed.notify_all()

    def discard_after(self, step: int) -> None:
        """Discard later steps that are in the store, or on their way there."""
        with self._changed:
            if self._waiting is not None and self._waiting > step:
                self._waiting = None
            self._uploaded = {other for other in self._uploaded if other <= step}
            self._most = step
        try:
            self._fence.check()
            committed = stored_steps(self._store.names("step_"), COMMIT)
            later = [s for s in committed if s > step and not self._is_of_another(s)]
            self._store.remove([object_name(other, COMMIT) for other in later])
        except OSError as error:
            text = f"discarded steps were not removed from {self._store}"
            warnings.warn(f"{text} ({_cause(error)})", stacklevel=2)

    def keep_also(self, best: int | None, safe: int | None) -> None:
        """Keep step `best` in the store, and the newest step up to `safe`, however old.

        The run may roll back to them. `best` need not be in the store.
        """
        with self._changed:
            self._also = best, safe

    @property
    def in_flight(self) -> frozenset[int]:
        """Steps that wait or are being uploaded: their local files must stay."""
        with self._changed:
            both = (self._waiting, self._uploading)
            return frozenset(step for step in both if step is not None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is in flight; return False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.in_flight, timeout_s)

    def lift_limit(self) -> None:
        """Let uploads take all the bandwidth: training is over."""
        self._store.limit.lift()

    def close(self) -> None:
        """Stop without finishing what is in flight: call `wait` first."""
        with self._changed:
            self._closed = True
            if self._waiting is not None:
                _warn_of_loss(self._waiting, self._store, "the run ended")
                self._waiting = None
            self._changed.notify_all()
        self._thread.join(_GRACE_S)
        for step in self.in_flight:
            _warn_of_loss(step, self._store, "the run ended")

    def _run(self) -> None:
        while (step := self._next()) is not None:
            with suppress(Warning):  # survives where warnings are errors
                self._handle(step)
            with self._changed:
                self._uploading = None
                self._changed.notify_all()

    def _next(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting is not None)
            self._uploading, self._waiting = self._waiting, None
            return self._uploading

    def _handle(self, step: int) -> None:
        try:
            self._upload(step)
        except Exception as error:
            return _warn_of_loss(step, self._store, _cause(error))
        try:
            self._fence.check()
            self._retain()
        except Exception as error:
            text = f"old checkpoints in {self._store} were not removed"
            warnings.warn(f"{text} ({_cause(error)})", stacklevel=1)

    def _upload(self, step: int) -> None:
        part = part_directory(self._directory, step, self._worker)
        text = self._read_text(part / MANIFEST)
        manifest = from_text(text, self._key)
        assert (manifest.step, manifest.worker) == (step, self._worker), part
        self._fence.check()
        try:
            self._put(part, manifest, text)
        except Conflict:
            self._fence.check()
            is_later = committed_lease(self._store, step) >= self._fence.number
            if is_later or self._is_of_another(step):
                raise
            self._remove_part(step)  # left over from discarded steps
            self._put(part, manifest, text)
        with self._changed:
            if step > self._most:
                return  # the step was discarded meanwhile
            if self._waiting is None or self._waiting > step:
                self._uploaded.add(step)
        commit(self._store, step, manifest.workers, self._fence, self._key)

    def _is_of_another(self, step: int) -> bool:
        """Return whether this worker's part of the stored step is another run's."""
        if self._own_run is None:
            return False
        run = saved_by(self._store, step, self._worker)
        return run is not None and not self._own_run.owns(run)

    def _put(self, part: Path, manifest: Manifest, text: str) -> None:
        def put(path: str) -> None:
            name = object_name(manifest.step, self._worker, path)
            self._store.put(name, part / path, manifest.files[path])

        self._for_each(put, manifest.files)
        name = object_name(manifest.step, self._worker, MANIFEST)
        self._store.put_text(name, text)

    def _retain(self) -> None:
        """Remove this worker's part of the run's steps, except of the newest committed.

        Steps after the newest one that this process committed are left over from an
        earlier start.
        """
        with self._changed:
            uploaded, (best, safe) = set(self._uploaded), self._also
        names = self._store.names("step_")
        parts = {*stored_steps(names, self._worker)}
        others = {s for s in parts if self._is_of_another(s)}
        committed = [s for s in stored_steps(names, COMMIT) if s not in others]
        newest = max(uploaded.intersection(committed), default=None)
        if newest is None:
            return
        kept = set([step for step in committed if step <= newest][-self._keep :])
        kept |= {step for step in uploaded if step > newest} | {best}
        if safe is not None:
            kept |= set([step for step in committed if step <= safe][-1:])
        for step in parts - others - kept:
            self._remove_part(step)

    def _remove_part(self, step: int) -> None:
        """Remove this worker's part, while other workers may be at the same step.

        Removes COMMIT first, so that no incomplete step looks complete. Removes it
        again last: a worker may have written it before it saw the manifest vanish (see
        `commit`).
        """
        manifest = object_name(step, self._worker, MANIFEST)
        self._store.remove([object_name(step, COMMIT), manifest])
        names = self._store.names(object_name(step, self._worker, ""))
        self._for_each(lambda name: self._store.remove([name]), names)
        self._store.remove([object_name(step, COMMIT)])

    def _for_each(self, action: Callable[[_T], None], items: Iterable[_T]) -> None:
        """Act on all items with several threads; stop at the first failure."""
        waiting, failures = deque(items), deque[Exception]()

        def work() -> None:
            while not failures and not self._closed:
                try:
                    item = waiting.popleft()
                except IndexError:
                    return
                try:
                    action(item)
                except Exception as error:
                    failures.append(error)

        threads = [
            threading.Thread(target=work, daemon=True, name=f"upload-{i}")
            for i in range(min(self._num_threads, len(waiting)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        if self._closed:
            raise InterruptedError("the run ended")


def _warn_of_loss(step: int, store: Store, why: str) -> None:
    warnings.warn(
        f"checkpoint of step {step} was not uploaded to {store} ({why}); training "
        "continues, local files and the steps committed there stay as they are",
        stacklevel=2,
    )


def _cause(error: Exception) -> str:
    got = error.got if isinstance(error, Conflict | LeaseLost) else str(error)
    return f"{type(error).__name__}: {got}".splitlines()[0]
