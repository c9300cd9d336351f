# SPDX-License-Identifier: Apache-2.0
"""Receives requests to stop a run, or to do without a machine that will be taken away.

Owns the thread that listens, and the handlers of SIGINT and SIGTERM during training.
Does not own the sources of notices (`notice_sources.py`) nor the reaction to them
(`training/session.py`, `training/loop.py`).
"""

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hetjax.report.progress import say_at_once
from hetjax.training.recovery.notice_sources import (
    GRACE_S,
    PATIENCE_S,
    Notice,
    NoticePolls,
    clouds,
    operator,
)


class Watch:
    """Within `with`, calls `on_notice` for each notice, from a separate thread.

    Listens to an operator if `run_dir` is given, and to `sources`: polls with the
    seconds between them, by default those of `clouds`. No call comes after `with`. If a
    call fails, that is a warning, and later notices are still heard.
    """

    def __init__(
        self,
        on_notice: Callable[[Notice], None],
        run_dir: Path | None,
        sources: Mapping[NoticePolls, float] | None = None,
    ) -> None:
        self._on_notice, self._over = on_notice, threading.Event()
        self._every_s = {} if run_dir is None else {operator(run_dir): 0.5}
        self._every_s |= clouds(os.environ) if sources is None else sources
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE_S)  # the look-up of a name may take it longer

    def _run(self) -> None:
        due_s = dict.fromkeys(self._every_s, 0.0)
        while due_s:
            looks, when_s = min(due_s.items(), key=lambda item: item[1])
            if self._over.wait(max(0.0, when_s - time.monotonic())):
                return
            try:
                notice = next(looks)
            except StopIteration:
                del due_s[looks]
                continue
            if notice is not None and not self._over.is_set():
                self._tell(notice)
            due_s[looks] = time.monotonic() + self._every_s[looks]

    def _tell(self, notice: Notice) -> None:
        try:
            self._on_notice(notice)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            warnings.warn(f"{notice.source}: notice not handled: {why}", stacklevel=2)


_RECOVERING = 1 / 3  # share of the grace that a recovery may still take


class StopRequest:
    """Within `with`, the first SIGINT or SIGTERM sets `reason`.

    A second SIGINT does what SIGINT did before `with`. `grace_s` is how long the
    machine stays after the first notice, None if that is unknown.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.grace_s: float | None = None
        self.is_saved = False  # all that is left is to copy what is saved
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
        """Whether the run must abandon what it is doing, to end in time."""
        if self.reason is None or self.grace_s is None:
            return False
        return time.monotonic() - self._noticed_s > _RECOVERING * self.grace_s

    @contextmanager
    def after(self, hours: float, since_s: float) -> Iterator[None]:
        """Within `with`, set `reason` when `hours` have passed since `since_s`.

        `since_s` is a time of `time.perf_counter`.
        """
        left_s = since_s + 3600 * hours - time.perf_counter()
        timer = threading.Timer(left_s, self._ask, (f"--max-hours {hours:g}",))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def on_notice(self, notice: Notice) -> None:
        """Note that this machine will be taken away; called by another thread."""
        if self.reason is None:
            self._noticed_s, self.grace_s = time.monotonic(), notice.grace_s
            self.reason = notice.source
            say_at_once(f"{notice.source}: {self._then}")

    def _ask(self, reason: str) -> None:
        """Note a reason to stop without hurry, as this machine stays.

        Called by another thread.
        """
        if self.reason is None:
            self.reason = reason
            say_at_once(f"{reason}: {self._then}")

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.reason == signal.Signals(number).name == "SIGTERM":
            return  # Slurm sends it to a job in several ways
        self._noticed_s = time.monotonic()
        self.grace_s = GRACE_S if number == signal.SIGTERM else None
        self.reason = signal.Signals(number).name
        signal.signal(signal.SIGINT, self._before[signal.SIGINT])
        unsaved = "" if self.is_saved else ", unsaved"
        again = (
            f"; Ctrl-C again: stop at once{unsaved}" if number == signal.SIGINT else ""
        )
        say_at_once(f"{self.reason}: {self._then}{again}")

    @property
    def _then(self) -> str:
        return "copying ends" if self.is_saved else "saving after this step"
