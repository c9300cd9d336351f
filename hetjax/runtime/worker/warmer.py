# SPDX-License-Identifier: Apache-2.0
"""What a worker compiles in the background, ahead of being asked to run it.

Owns the thread and its priority. Does not own what is compiled (`service.py`).
"""

import os
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, Queue

_LOWEST = 19  # of the system's priorities: training comes first


class Warmer:
    """Compiles one after the other what it is given, in the background.

    It stays in JAX's cache on the disk and, as long as this process lives, in memory.
    """

    def __init__(self) -> None:
        self._waiting: Queue[Callable[[], None]] = Queue()
        self._thread: threading.Thread | None = None

    def add(self, compile_: Callable[[], None]) -> None:
        """Compile this when all before it are done; returns at once."""
        self._waiting.put(compile_)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="warm")
            self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether nothing waits, nor is being compiled."""
        return not self._waiting.unfinished_tasks

    def clear(self) -> None:
        """Forget what waits: now something else has to be compiled."""
        with suppress(Empty):
            while True:
                self._waiting.get_nowait()
                self._waiting.task_done()

    def _run(self) -> None:
        with suppress(AttributeError, OSError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        while True:
            compile_ = self._waiting.get()
            try:
                compile_()
            except Exception as error:
                warnings.warn(f"not compiled ahead: {error}", stacklevel=1)
            finally:
                self._waiting.task_done()
