# SPDX-License-Identifier: Apache-2.0
"""Learns from a job step that Slurm will take the job's nodes away.

When a preemption begins, Slurm sends SIGTERM to the steps of a job; the job's script
gets it only when the grace is over. So one step does nothing but wait for SIGTERM. It
then makes this process, the controller, send SIGTERM to itself: the run saves and ends.
Owns that step. Does not own how a step starts (`on_slurm.py`), saving
(`training/recovery/notices.py`), nor the requeue (`job_script.py`).
"""

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
    """Within `with`, a SIGTERM to the steps of the job also reaches this process.

    `step` is the command that runs LISTENS on a node of the job. If it fails, the run
    learns of a preemption only when the script gets SIGTERM.
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
    with process.stdout as lines:
        if any(line.strip() == _HEARD for line in lines):
            # to the main thread, whose wait ends with it; another thread's would not
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
