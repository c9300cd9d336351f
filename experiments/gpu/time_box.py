# SPDX-License-Identifier: Apache-2.0
"""Runs a command within a time limit, and ends it with everything that it started.

Each process that descends from the command carries a mark in its environment. So those
that have left its process group (workers, daemons) are found, too. The command's
standard input ends when this process does, however that ends. Does not own the
commands.
"""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

MARK = "HETJAX_SESSION_PART"
_GRACE_S = 2.0  # from the request to end until the kill


def run_boxed(command: Sequence[str], limit_s: float, log: Path) -> int | None:
    """Run the command with its output in `log`; return its code, None on timeout.

    When this returns or raises, no process that the command started is left, nor any
    of its temporary files.
    """
    with TemporaryDirectory(prefix="hetjax-part-", ignore_cleanup_errors=True) as own:
        mark = uuid.uuid4().hex
        process = _start(command, log, {MARK: mark, "TMPDIR": own})
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end_all(mark)
            process.wait()


def _start(
    command: Sequence[str], log: Path, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | variables,
            start_new_session=True,
        )


def _end_all(mark: str) -> None:
    """Ask all marked processes to end; kill those still there after the grace time."""
    for pid in _marked(mark):
        _send(pid, signal.SIGTERM)
    kill_s = time.monotonic() + _GRACE_S
    while left := [*_marked(mark)]:
        if time.monotonic() > kill_s:
            for pid in left:
                _send(pid, signal.SIGKILL)
        time.sleep(0.05)


def _marked(mark: str) -> Iterator[int]:
    entry = f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            if entry in path.read_bytes().split(b"\0"):
                yield int(path.parts[2])


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
