# SPDX-License-Identifier: Apache-2.0
"""Runs a worker process that writes, after each step, what it has sent so far.

    <folder>/<worker>.<step>.json: [[receiver, kind, bytes], ...]

Steps are those of this process, from 0. Bytes, without headers, count when a message is
handed to its connection.
"""

import json
import sys
from collections.abc import Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from hetjax.data.batches import Batch
from hetjax.plans.worker_map import file_name
from hetjax.runtime.execution.commit import StepCommit
from hetjax.runtime.worker.bootstrap import read_bootstrap
from hetjax.runtime.worker.server import serve
from hetjax.training.worker import TrainingWork, work_of

FOLDER = "sent"  # key of the settings: where it writes


def counting_work(worker: str, settings: Mapping[str, Any]) -> TrainingWork:
    """Return the work of a run's worker, extended by counting."""
    work, folder = work_of(worker, settings), Path(settings[FOLDER])
    assert isinstance(work, TrainingWork)
    runtime, step, steps = work.runtime, work.runtime.step, count()

    def counted(number: int, batch: Batch, *others: Any) -> StepCommit:
        told = step(number, batch, *others)
        assert runtime._joined is not None
        sent = runtime._joined.peers.sent.by_link_and_kind()
        rows = [[*link, num_bytes] for link, num_bytes in sent.items()]
        file = folder / f"{file_name(worker)}.{next(steps)}.json"
        file.write_text(json.dumps(rows))
        return told

    runtime.step = counted  # pyright: ignore
    return work


def main() -> None:
    bootstrap = read_bootstrap(sys.stdin.readline())
    serve(bootstrap, partial(counting_work, bootstrap.worker))


if __name__ == "__main__":
    main()
