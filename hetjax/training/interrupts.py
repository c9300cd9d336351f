# SPDX-License-Identifier: Apache-2.0
"""Handles SIGINT and SIGTERM while a run has nothing to save: in start-up, at its end.

Owns how they unwind a start, so that it releases what it holds. Does not own what
signals do during training (`training/recovery/notices.py`), nor before and after a run
(`cli/process.py`).
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """SIGINT came while there was nothing to save."""


class Terminated(Interrupted):
    """SIGTERM came while there was nothing to save."""


_RAISED = {signal.SIGINT: Interrupted, signal.SIGTERM: Terminated}


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise Interrupted within `with` at the first SIGINT or SIGTERM.

    So locks, leases and workers are released. The next signal goes to the former
    handler. A library may turn Interrupted into another error, or it may be raised
    where Python cannot propagate it: the run is interrupted in these cases, too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # other threads receive no signals
        return
    before = {number: signal.getsignal(number) for number in _RAISED}
    before = {n: each for n, each in before.items() if each != signal.SIG_IGN}
    show, received = sys.unraisablehook, list[signal.Signals]()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def interrupt(number: int, frame: FrameType | None) -> None:
        restore()
        received.append(signal.Signals(number))
        raise _RAISED[received[0]]

    def unraisable(what: Any) -> None:
        if isinstance(what.exc_value, Interrupted):
            signal.raise_signal(received[0])
        else:
            show(what)

    try:
        sys.unraisablehook = unraisable
        for number in before:
            signal.signal(number, interrupt)
        yield
    except Exception as error:
        if received:
            raise _RAISED[received[0]] from error
        raise
    finally:
        restore()
        sys.unraisablehook = show
