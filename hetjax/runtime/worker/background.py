# SPDX-License-Identifier: Apache-2.0
"""Runs a worker's background work: one task, or compiling ahead.

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
    """Calls `do` in a thread of this name, which does not keep the process alive."""

    def __init__(self, do: Callable[[], None], name: str) -> None:
        self._do, self._result = do, Future[None]()
        threading.Thread(target=self._run, daemon=True, name=name).start()

    def wait(self) -> None:
        """Return once `do` has returned; raise what it has raised."""
        self._result.result()

    def _run(self) -> None:
        try:
            self._do()
        except BaseException as error:
            self._result.set_exception(error)
        else:
            self._result.set_result(None)


class Warmer:
    """Compiles what `add` gives it, one after the other, in the background.

    The programs stay in JAX's cache on the disk and, as long as this process lives, in
    memory.
    """

    def __init__(self) -> None:
        self._waiting: Queue[Callable[[], None]] = Queue()
        self._thread: threading.Thread | None = None

    def add(self, compile_: Callable[[], None]) -> None:
        """Compile this once all earlier ones are done; return at once."""
        self._waiting.put(compile_)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="warm")
            self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether nothing waits or is being compiled."""
        return not self._waiting.unfinished_tasks

    def clear(self) -> None:
        """Drop what waits: something else has to be compiled now."""
        with suppress(Empty):
            while True:
                self._waiting.get_nowait()
                self._waiting.task_done()

    def _run(self) -> None:
        with suppress(AttributeError, OSError):  # of this thread only, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        while True:
            compile_ = self._waiting.get()
            try:
                compile_()
            except Exception as error:
                warnings.warn(f"not compiled ahead: {error}", stacklevel=1)
            finally:
                self._waiting.task_done()
