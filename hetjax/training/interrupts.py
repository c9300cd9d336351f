# SPDX-License-Identifier: Apache-2.0
"""SIGINT and SIGTERM while a run has nothing to save: in its start-up, at its end.

Owns how they unwind a start, so that what it holds is given back. Does not own what
they do while training goes on (`training/recovery/notices.py`), nor before a run and
after it (`cli/process.py`).
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """SIGINT came where there is nothing to save."""


class Terminated(Interrupted):
    """SIGTERM did."""


_RAISED = {signal.SIGINT: Interrupted, signal.SIGTERM: Terminated}


@contextmanager
def interruptible() -> Iterator[None]:
    """Within it, the first SIGINT or SIGTERM raises Interrupted, so that locks, leases
    and workers are given back; the next goes to the handler that was there before.

    What the interrupt has made of itself on its way, through a library that turns it
    into an error of its own, or as an exception that Python can pass to nobody, ends
    the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are not its business
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
