# SPDX-License-Identifier: Apache-2.0
"""Breaks rules of the store: 28 to 31 of the protocol, and parts of other rules.

Owns these mutations; each leaves out one check of the product. Does not own their
installation (`breaking.py`), the other rules (`broken_messages.py`,
`broken_recovery.py`), nor the search for them (`mutations.py`).
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.simulation.breaking import breaks, function, method
from hetjax.checkpoint import stored_steps
from hetjax.checkpoint.file_records import record_of_bytes
from hetjax.checkpoint.format import MANIFEST, Manifest
from hetjax.checkpoint.stored_steps import COMMIT, object_name
from hetjax.checkpoint.uploader import Uploader
from hetjax.runtime.control import recovery, recovery_decisions

_put, _keep_also = Uploader._put, Uploader.keep_also
_commit_text = stored_steps._commit_text


def _manifest_first(self: Any, part: Path, manifest: Manifest, text: str) -> None:
    name = object_name(manifest.step, self._worker, MANIFEST)
    self._store.put_text(name, text)
    _put(self, part, manifest, text)


def _with_those_that_are_there(
    store: Any, step: int, workers: Iterable[str], lease: int, key: Any
) -> str:
    texts = {w: stored_steps._manifest_text(store, step, w) for w in workers}
    checksums = {
        worker: record_of_bytes(text.encode()).crc32c
        for worker, text in sorted(texts.items())
        if text is not None
    }
    body = {"version": 1, "step": step, "manifests": checksums, "lease": lease}
    return json.dumps(body) + "\n"


def _files_first(self: Any, step: int) -> None:
    names = self._store.names(object_name(step, self._worker, ""))
    files = [name for name in names if not name.endswith(MANIFEST)]
    self._for_each(lambda name: self._store.remove([name]), files)
    manifest = object_name(step, self._worker, MANIFEST)
    self._store.remove([manifest, object_name(step, COMMIT)])


def _best_alone(self: Any, best: int | None, safe: int | None) -> None:
    _keep_also(self, best, None)


def _needing_the_store(controller: Any, storage: Any) -> Any:
    return stored_steps.in_store(storage.store(is_tried=False), storage.key())


STORE = (
    breaks(
        23,
        "a last checkpoint that is gone from the disks is taken for stored",
        function(recovery_decisions.is_kept, lambda saved, restored: True),
    ),
    breaks(
        28,
        "a manifest is uploaded before its files",
        method(Uploader, "_put", _manifest_first),
    ),
    breaks(
        28,
        "a step is committed with the parts that are there",
        function(_commit_text, _with_those_that_are_there),
    ),
    breaks(
        29,
        "files are removed before the manifest that lists them",
        method(Uploader, "_remove_part", _files_first),
    ),
    breaks(
        29,
        "what the run may go back to goes from the store",
        method(Uploader, "keep_also", _best_alone),
    ),
    breaks(
        30,
        "a recovery needs an answer of the store",
        function(recovery._in_store, _needing_the_store),
    ),
)
