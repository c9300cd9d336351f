# SPDX-License-Identifier: Apache-2.0
"""A worker whose devices take a set time for each pass, which a test can extend.

A sleep adds this time; the model is so small that its computation hardly counts. A file
in the folder HETJAX_TEST_SLOW, named like a node, holds the factor on its time.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetjax.plans.worker_map import node_of
from hetjax.runtime.execution import executor
from hetjax.runtime.execution.executor import Executor, StepContext
from hetjax.runtime.worker import server
from hetjax.schedule.programs.action import Action, Op
from hetjax.training import worker

FOLDER = "HETJAX_TEST_SLOW"
_PASS_S = 0.015
_Run = Callable[[Executor, Action, StepContext], Any]


def slowed(run: _Run, file: Path) -> _Run:
    def sleep_and_run(owner: Executor, action: Action, step: StepContext) -> Any:
        factor = 1.0
        with suppress(FileNotFoundError):
            factor = float(file.read_text())
        time.sleep(_PASS_S * factor)
        return run(owner, action, step)

    return sleep_and_run


def serve(bootstrap: server.WorkerBootstrap, *rest: Any) -> None:
    file = Path(os.environ[FOLDER], node_of(bootstrap.worker))
    meaning: dict[Op, Any] = executor._MEANING
    for op in (Op.F, Op.B, Op.FB):
        meaning[op] = slowed(meaning[op], file)
    server.serve(bootstrap, *rest)


if __name__ == "__main__":
    worker.serve = serve
    worker.main()
