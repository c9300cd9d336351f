# SPDX-License-Identifier: Apache-2.0
"""Gathers the parts of a checkpoint on the controller's machine.

Machines that share no folder keep checkpoints on their own disks, but the model is
wanted in one place. Owns which workers have to send a part, and the check that there is
room for it. Does not own sending and storing (`checkpoint/replication.py`), nor which
checkpoint is gathered (`training/ending.py`).
"""

import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from hetjax.checkpoint.disk import read_manifest, remove_part
from hetjax.checkpoint.format import attempt, part_directory
from hetjax.checkpoint.reader import steps
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.checkpoint.stores.store import StoreError
from hetjax.plans.worker_map import file_name
from hetjax.runtime.rpc.gathering_schema import PartSize, SendPart, TellPartSize
from hetjax.runtime.rpc.limits import moving_s
from hetjax.runtime.rpc.worker_connections import WorkerConnections

OnBegin = Callable[[Sequence[str], int], None]  # gets the senders, and all their bytes
_LEFT_FREE = 1 << 30  # bytes that stay free for the run's other files


def gather(
    connections: WorkerConnections,
    workers: Sequence[str],
    storage: CheckpointStorage,
    step: int,
    also: Collection[int],
    on_begin: OnBegin,
) -> int:
    """Let these workers send their parts of a step to the folder of `storage` here.

    Returns the bytes that they have sent.
    Parts that are there already are not sent. Of earlier parts of these workers, only
    those of the steps in `also` stay. `on_begin` is called if any are sent. Raises
    StoreError if there is no room, or if the step is not whole afterwards, and
    WorkerLost.
    """
    folder = Path(storage.directory)
    request = TellPartSize(storage=storage, step=step)
    parts = connections.ask(dict.fromkeys(workers, request))
    senders = [w for w, part in parts.items() if not _is_here(folder, w, step, part)]
    if num_bytes := sum(parts[worker].num_bytes for worker in senders):
        folder.mkdir(parents=True, exist_ok=True)
        _check_room(folder, num_bytes)
        on_begin(senders, num_bytes)
    order = SendPart(
        storage=storage, step=step, also=[*also], expected_s=moving_s(num_bytes)
    )
    try:
        answers = connections.ask(dict.fromkeys(senders, order))
        failures = [f"{w} failed: {a.failure}" for w, a in answers.items() if a.failure]
        if failures:
            raise StoreError("; ".join(failures))
        if step not in steps(folder, storage.key(), storage.run):
            raise StoreError("machines that left have parts of it")
    except BaseException:  # half a checkpoint is of no use
        for worker in senders:
            with suppress(OSError):  # a worker may still be sending
                remove_part(_part(folder, worker, step))
        raise
    return num_bytes


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes + _LEFT_FREE > free:
        raise StoreError(
            f"it takes {num_bytes:,} bytes, and the disk of {folder} has {free:,} "
            f"free, of which {_LEFT_FREE:,} are to stay free"
        )


def _part(folder: Path, worker: str, step: int) -> Path:
    return part_directory(folder, step, file_name(worker))


def _is_here(folder: Path, worker: str, step: int, part: PartSize) -> bool:
    """Return whether there is nothing to send."""
    found = read_manifest(_part(folder, worker, step))
    same = found is not None and attempt(found.host) == part.attempt
    return same or not part.num_bytes
