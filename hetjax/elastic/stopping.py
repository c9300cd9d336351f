# SPDX-License-Identifier: Apache-2.0
"""What asks a run to stop: noted at once, obeyed between steps.

Owns the handlers of SIGINT and SIGTERM while training goes on, and the reason to stop.
Does not own other notices (`notices.py`) nor what a stop does (`training/loop.py`).
"""

import os
import signal
import time
from types import FrameType
from typing import Any

from hetjax.elastic.notices import GRACE_S, Notice

_RECOVERING = 1 / 3  # share of the grace that a recovery may still take


class StopRequest:
    """Within `with`, the first SIGINT or SIGTERM sets `reason`.

    A second SIGINT interrupts as usual. `grace_s` is how long the machine stays after
    the notice that came first, None if nobody said.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.grace_s: float | None = None
        self._noticed_s = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def leaves_no_time(self) -> bool:
        """Whether what goes on now must be given up, so that the end comes in time."""
        if self.reason is None or self.grace_s is None:
            return False
        return time.monotonic() - self._noticed_s > _RECOVERING * self.grace_s

    def hear(self, notice: Notice) -> None:
        """Called by another thread: this machine is about to be taken away."""
        if self.reason is None:
            self._noticed_s, self.grace_s = time.monotonic(), notice.grace_s
            self.reason = notice.source
            os.write(2, f"\n{notice.source}: saving after this step\n".encode())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noticed_s = time.monotonic()
        self.grace_s = GRACE_S if number == signal.SIGTERM else None
        self.reason = signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.default_int_handler)
        again = (
            "; Ctrl-C again: stop at once, unsaved" if number == signal.SIGINT else ""
        )
        # not print: it may be what the signal has interrupted
        os.write(2, f"\n{self.reason}: saving after this step{again}\n".encode())
