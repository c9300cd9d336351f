# SPDX-License-Identifier: Apache-2.0
"""What a worker does beside what it is asked: one thing, or what is wanted later.

Owns the threads, their priority, and where their errors go. Does not own what is done
and compiled there (`service.py`).
"""

import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, Queue

_LOWEST = 19  # of the system's priorities: training comes first


class Background:
    """Calls `do`, until it is waited for, in a thread of this name, which keeps no
    process from ending."""

    def __init__(self, do: Callable[[], None], name: str) -> None:
        self._do, self._result = do, Future[None]()
        threading.Thread(target=self._run, daemon=True, name=name).start()

    def wait(self) -> None:
        """Return when it is done; raises what it has raised."""
        self._result.result()

    def _run(self) -> None:
        try:
            self._do()
        except BaseException as error:
            self._result.set_exception(error)
        else:
            self._result.set_result(None)


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
