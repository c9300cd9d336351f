# SPDX-License-Identifier: Apache-2.0
"""Starts a process that answers one request of a run, line by line.

Owns both sides of the process. A thread of the run would slow training, and a thread
that is inside a solver or a compiler when the interpreter ends aborts the whole
process. Does not own the requests (`planning_process.py`,
`training/replanning/weighing_process.py`).
"""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import IO, Any

from hetjax.files.parsing import json_value

_LAST_WORDS = 3  # lines: as many as a BadInput has


class BackgroundProcess:
    """`python -m module`, with the request on its standard input as JSON."""

    def __init__(self, module: str, request: dict[str, Any], purpose: str) -> None:
        self._purpose, self._read_bytes, self.has_ended = purpose, 0, False
        self._answers, self._errors = TemporaryFile(), TemporaryFile()
        with TemporaryFile() as asked:  # a pipe may be full before the process reads
            asked.write(json.dumps(request).encode())
            asked.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=asked,
                stdout=self._answers,
                stderr=self._errors,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},  # workers have the devices
                start_new_session=True,  # only the run itself handles Ctrl-C
            )

    def found(self) -> list[Any]:
        """Return the answers since the last call, without waiting."""
        if not self.has_ended and self._process.poll() is not None:
            self.has_ended = True
            if self._process.returncode:
                said = _text(self._errors, 0).strip().splitlines()
                why = "; ".join(said[-_LAST_WORDS:]) or self._process.returncode
                warnings.warn(f"{self._purpose} failed: {why}", stacklevel=2)
        whole, newline, _ = _text(self._answers, self._read_bytes).rpartition("\n")
        self._read_bytes += len((whole + newline).encode())
        return [json_value(line) for line in whole.splitlines()]

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        self._answers.close()
        self._errors.close()


def _text(file: IO[bytes], start: int) -> str:
    """Return the text of the file from `start`; the other process appends to it."""
    number = file.fileno()
    return os.pread(number, os.fstat(number).st_size - start, start).decode()


@contextmanager
def answering() -> Iterator[tuple[Any, IO[str]]]:
    """Yield the request, and the file for answers, one per line: the process's side.

    Other output to standard output, such as a solver's, goes to standard error.
    """
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        yield json_value(sys.stdin.read()), answers
