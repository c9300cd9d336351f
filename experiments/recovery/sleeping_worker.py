# SPDX-License-Identifier: Apache-2.0
"""Runs a worker whose devices take a set time per microbatch, whatever the load is.

The variable HETJAX_DEVICE_S maps each node to the seconds that a microbatch keeps a
device. A sleep takes that time, in addition to the computation of a model so small that
it hardly counts. Forward takes a third of it. Does not own the model
(`experiments/islands/models.py`).
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from experiments.islands import models as models
from hetjax.plans.worker_map import node_of
from hetjax.runtime.execution import executor
from hetjax.runtime.execution.executor import Executor, StepContext
from hetjax.runtime.worker import server
from hetjax.schedule.programs.action import Action, Op
from hetjax.training.worker import main

DEVICE_S = "HETJAX_DEVICE_S"
_SHARES = {Op.F: 1 / 3, Op.B: 2 / 3, Op.FB: 1.0}
_Run = Callable[[Executor, Action, StepContext], Any]


def slowed(run: _Run, seconds: float) -> _Run:
    def run_and_sleep(owner: Executor, action: Action, step: StepContext) -> Any:
        time.sleep(seconds)
        return run(owner, action, step)

    return run_and_sleep


def serve(bootstrap: server.WorkerBootstrap, *rest: Any) -> None:
    device_s = json.loads(os.environ[DEVICE_S])[node_of(bootstrap.worker)]
    meaning: dict[Op, Any] = executor._MEANING
    for op, share in _SHARES.items():
        meaning[op] = slowed(meaning[op], share * device_s)
    server.serve(bootstrap, *rest)


if __name__ == "__main__":
    sys.modules["hetjax.training.worker"].serve = serve  # type: ignore[attr-defined]
    main()
