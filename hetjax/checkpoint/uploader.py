# SPDX-License-Identifier: Apache-2.0
"""Local checkpoints copied to a store in the background.

    <store>/step_00000010/<worker>/...  as on disk, the manifest last
    <store>/step_00000010/COMMIT        once the manifests of all its workers are there

Owns `Uploader`: one worker's thread, and its retention in the store. Does not own what
COMMIT says (`commit.py`), how a store keeps objects (`store.py`) nor the local files
(`save.py`).
"""

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from hetjax.checkpoint.commit import (
    COMMIT,
    commit,
    object_name,
    stored_steps,
)
from hetjax.checkpoint.format import MANIFEST, part_directory
from hetjax.checkpoint.manifest import Manifest, from_text
from hetjax.checkpoint.stores.store import Conflict, Store

_GRACE_S = 2.0
_T = TypeVar("_T")


class Uploader:
    """Copies one worker's committed steps to a store, the newest first.

    A step that is overtaken while it waits is skipped; one that fails warns once, and
    training goes on. The store keeps the newest `keep` committed steps; an older one
    goes only after a newer COMMIT is in place, and only this worker's files of it.
    """

    def __init__(
        self,
        store: Store,
        directory: Path,
        worker: str,
        num_threads: int = 8,
        keep: int = 2,
    ) -> None:
        assert num_threads >= 1 and keep >= 1, (num_threads, keep)
        self._store, self._directory, self._worker = store, directory, worker
        self._num_threads, self._keep = num_threads, keep
        self._changed = threading.Condition()
        self._waiting: int | None = None
        self._uploading: int | None = None
        self._uploaded: set[int] = set()  # by this run, as it stands now
        self._closed = False
        # A daemon: a store that does not answer must not hold up the program's end.
        self._thread = threading.Thread(target=self._run, daemon=True, name="upload")
        self._thread.start()

    def __enter__(self) -> "Uploader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def offer(self, step: int) -> None:
        """Ask for a step whose local commit is done; returns at once.

        A step before an earlier one says that the run went back to it.
        """
        with self._changed:
            assert not self._closed, "offered to a closed uploader"
            self._waiting = step
            self._uploaded = {other for other in self._uploaded if other < step}
            self._changed.notify_all()

    @property
    def in_flight(self) -> frozenset[int]:
        """Steps waiting or on their way: their local files must stay."""
        with self._changed:
            return self._busy()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether nothing is in flight any more, after waiting for it."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy(), timeout_s)

    def hurry(self) -> None:
        """Training is over: what is on its way may take all the bandwidth."""
        self._store.lift_limit()

    def close(self) -> None:
        """Stop without finishing what is in flight; `wait` first to have it stored."""
        with self._changed:
            self._closed = True
            if self._waiting is not None:
                _warn_of_loss(self._waiting, self._store, "the run ended")
                self._waiting = None
            self._changed.notify_all()
        self._thread.join(_GRACE_S)
        for step in self.in_flight:
            _warn_of_loss(step, self._store, "the run ended")

    def _busy(self) -> frozenset[int]:
        both = (self._waiting, self._uploading)
        return frozenset(step for step in both if step is not None)

    def _run(self) -> None:
        while (step := self._next()) is not None:
            with suppress(Warning):  # lives on where warnings are made errors
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
            self._retain()
        except Exception as error:
            text = f"old checkpoints in {self._store} were not removed"
            warnings.warn(f"{text} ({_cause(error)})", stacklevel=1)

    def _upload(self, step: int) -> None:
        own = part_directory(self._directory, step, self._worker)
        text = (own / MANIFEST).read_text()
        manifest = from_text(text)
        assert (manifest.step, manifest.worker) == (step, self._worker), own
        try:
            self._put(own, manifest, text)
        except Conflict:
            if self._store.get_text(object_name(step, COMMIT)) is not None:
                raise
            self._remove_part(step)  # remains of a run that was given up
            self._put(own, manifest, text)
        with self._changed:
            if self._waiting is None or self._waiting > step:
                self._uploaded.add(step)
        commit(self._store, step, manifest.workers)

    def _put(self, own: Path, manifest: Manifest, text: str) -> None:
        def put(path: str) -> None:
            name = object_name(manifest.step, self._worker, path)
            self._store.put(name, own / path, manifest.files[path])

        self._for_each(put, manifest.files)
        name = object_name(manifest.step, self._worker, MANIFEST)
        self._store.put_text(name, text)

    def _retain(self) -> None:
        """Remove this worker's part of all steps but the newest committed ones.

        Steps after the newest one that this run committed are another past's.
        """
        with self._changed:
            uploaded = set(self._uploaded)
        names = self._store.names("step_")
        committed = stored_steps(names, COMMIT)
        newest = max(uploaded.intersection(committed), default=None)
        if newest is None:
            return
        kept = set([step for step in committed if step <= newest][-self._keep :])
        kept |= {step for step in uploaded if step > newest}
        for step in set(stored_steps(names, self._worker)) - kept:
            self._remove_part(step)

    def _remove_part(self, step: int) -> None:
        """Remove this worker's part, while other workers may be at the same step.

        COMMIT goes first, so that no step looks whole that is not; and again last, as
        a worker may have written it before it saw the manifest vanish (see `commit`).
        """
        manifest = object_name(step, self._worker, MANIFEST)
        self._store.remove([object_name(step, COMMIT), manifest])
        names = self._store.names(object_name(step, self._worker, ""))
        self._for_each(lambda name: self._store.remove([name]), names)
        self._store.remove([object_name(step, COMMIT)])

    def _for_each(self, action: Callable[[_T], None], items: Iterable[_T]) -> None:
        """Act on all items with several threads; the first failure stops the rest."""
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
        "goes on, local files and the steps committed there stay as they are",
        stacklevel=2,
    )


def _cause(error: Exception) -> str:
    got = error.got if isinstance(error, Conflict) else str(error)
    return f"{type(error).__name__}: {got}".splitlines()[0]
