# SPDX-License-Identifier: Apache-2.0
"""What asks a run to stop: noted at once, obeyed between steps.

Owns the handlers of SIGINT and SIGTERM while training goes on, and the reason to stop.
Does not own other notices (`notices.py`) nor what a stop does (`loop.py`).
"""

import os
import signal
from types import FrameType
from typing import Any

from hetjax.training.notices import GRACE_S, Notice


class StopRequest:
    """Within `with`, the first SIGINT or SIGTERM sets `reason`.

    A second SIGINT interrupts as usual. `grace_s` is how long the machine stays after
    the notice that came first, None if nobody said.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.grace_s: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hear(self, notice: Notice) -> None:
        """Called by another thread: this machine is about to be taken away."""
        if self.reason is None:
            self.reason, self.grace_s = notice.source, notice.grace_s
            os.write(2, f"\n{notice.source}: saving after this step\n".encode())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name
        self.grace_s = GRACE_S if number == signal.SIGTERM else None
        signal.signal(signal.SIGINT, signal.default_int_handler)
        again = (
            "; Ctrl-C again: stop at once, unsaved" if number == signal.SIGINT else ""
        )
        # not print: it may be what the signal has interrupted
        os.write(2, f"\n{self.reason}: saving after this step{again}\n".encode())
