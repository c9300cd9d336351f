# SPDX-License-Identifier: Apache-2.0
"""Hears in a job step that Slurm is to take the job's nodes away.

A preemption with a grace sends SIGTERM to the steps of a job as the grace begins, and
to the job's script only when it ends. So one step does nothing but listen; what it
hears reaches this process, the controller, as SIGTERM, after which the run saves and
ends. Owns that step. Does not own how a step is started (`on_slurm.py`), saving
(`training/recovery/notices.py`), nor what the script does then (`job_script.py`).
"""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_HEARD = "heard"
_END_S = 10.0
# `read` returns at the end of its input, too: the step ends with this process
LISTENS = ("sh", "-c", f'trap "echo {_HEARD}; exit" TERM; read end')


@contextmanager
def end_noticed(step: Sequence[str]) -> Iterator[None]:
    """Within `with`, a SIGTERM to the steps of the job is one to this process.

    `step` are the words that run LISTENS on a node of the job. If that fails, the run
    hears of a preemption when the script does.
    """
    process = subprocess.Popen(
        step,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C in salloc is for the run
    )
    thread = threading.Thread(target=_listen, args=(process,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        thread.join(_END_S)
        process.kill()
        process.wait()


def _listen(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    with process.stdout as told:
        if any(line.strip() == _HEARD for line in told):
            os.kill(os.getpid(), signal.SIGTERM)
