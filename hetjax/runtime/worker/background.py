# SPDX-License-Identifier: Apache-2.0
"""One thing that a worker does beside what it is asked next, until it is waited for.

Owns the thread, and that what goes wrong there is raised where it is waited for. Does
not own what is not wanted before long (`warmer.py`).
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future


class Background:
    """Calls `do` in a thread of this name, which keeps no process from ending."""

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
