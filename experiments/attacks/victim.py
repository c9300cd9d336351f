# SPDX-License-Identifier: Apache-2.0
"""Runs `hetjax train`, or one of its workers, with attacks from within.

    python -m experiments.attacks.victim [WORDS OF hetjax train]

Without words it is a worker of such a run. Each file in the folder HETJAX_ATTACK is an
attack on the first process that reaches its trigger, which removes the file:

    hang-REQUEST, die-REQUEST   when a worker is asked for it (`runtime/rpc/schema.py`)
    poison-STEP, flip-STEP      after the update of the step: an infinite weight, or a
                                flipped bit of one

HETJAX_ATTACK_LIMIT_S sets the time limit of worker requests (an abort then has 2 s, the
start of a worker keeps its limit), and HETJAX_ATTACK_CALL_S that of a call to a store,
so that no attack takes minutes.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetjax import train
from hetjax.checkpoint.stores import store
from hetjax.launchers.local_processes import OnThisMachine
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.runtime.rpc import schema
from hetjax.runtime.rpc.message import LIMITS, START, AnyRequest, Limit
from hetjax.runtime.worker.service import WorkerService
from hetjax.training import worker
from tests.training.flips import flip_weight
from tests.training.poison import poison

MODULE = "experiments.attacks.victim"
FOLDER, LIMIT_S, CALL_S = (
    "HETJAX_ATTACK",
    "HETJAX_ATTACK_LIMIT_S",
    "HETJAX_ATTACK_CALL_S",
)
_ABORT_S, _FOR_EVER_S = 2.0, 3600.0
_answer = WorkerService.answer


def is_due(attack: str) -> bool:
    with suppress(FileNotFoundError):
        Path(os.environ[FOLDER], attack).unlink()
        return True
    return False


def hang() -> None:
    time.sleep(_FOR_EVER_S)


def attacked(service: WorkerService, request: AnyRequest) -> schema.Message:
    asked = type(request).__name__
    if is_due(f"hang-{asked}"):
        hang()
    if is_due(f"die-{asked}"):
        os.kill(os.getpid(), signal.SIGKILL)
    told = _answer(service, request)
    if isinstance(request, schema.Train):
        runtime = service._runtime
        for name, harm in _HARMS.items():
            if is_due(f"{name}-{request.step + 1}"):
                harm(runtime)
    return told


def _flip(runtime: StageRuntime) -> None:
    flip_weight(runtime, next(iter(runtime.stages)))


_HARMS: dict[str, Callable[[StageRuntime], object]] = {"poison": poison, "flip": _flip}


def shorten_limits() -> None:
    """Shorten the timeouts of the run."""
    if LIMIT_S in os.environ:
        most_s = float(os.environ[LIMIT_S])
        for kind, limit in LIMITS.items():
            if kind != START:
                LIMITS[kind] = Limit(most_s, limit.what)
        kind = schema.Abort
        LIMITS[kind] = Limit(_ABORT_S, LIMITS[kind].what)
    store.CALL_S = float(os.environ.get(CALL_S, store.CALL_S))


def main() -> Any:
    WorkerService.answer = attacked  # pyright: ignore
    if len(sys.argv) == 1:
        return worker.main()
    shorten_limits()
    defaults = OnThisMachine.__init__.__kwdefaults__
    assert defaults is not None
    defaults["module"] = MODULE
    return train.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
