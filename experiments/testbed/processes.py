# SPDX-License-Identifier: Apache-2.0
"""Ends processes for certain, and holds signals during the removal of a testbed.

Owns how a set of processes is ended, and how a signal becomes an exception, so that a
testbed is removed. Does not own which processes these are.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_ENDING = (signal.SIGTERM, signal.SIGHUP)
GRACE_S = 2.0
_KILL_S = 10.0


def end(pids: Callable[[], set[int]], grace_s: float = GRACE_S) -> None:
    """End all that `pids` lists: by SIGTERM, then by SIGKILL, until none is left.

    Calls `pids` repeatedly, so it finds processes that an ending process started.
    """
    if _gone(pids, signal.SIGTERM, grace_s, each_once=True):
        return
    if not _gone(pids, signal.SIGKILL, _KILL_S, each_once=False):
        raise RuntimeError(f"processes {sorted(pids())} outlive SIGKILL")


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_alive() -> set[int]:
    """Return the ids of all processes that are no zombies."""
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    return {pid for pid in pids if is_alive(pid)}


def end_group(leader: int) -> None:
    """End all processes of this leader's process group."""
    end(lambda: _group(leader))


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit, as Ctrl-C raises KeyboardInterrupt.

    A program's own handlers stay, and nothing changes outside the main thread.
    """
    ours = [s for s in _ENDING if signal.getsignal(s) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        ours = []
    for number in ours:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hold the signals that would interrupt the block; raise the first after it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: held.append(number))
        for number in (signal.SIGINT, *_ENDING)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: not set by Python, which cannot restore it
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if held:
        signal.raise_signal(held[0])


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _gone(
    pids: Callable[[], set[int]], number: int, limit_s: float, *, each_once: bool
) -> bool:
    told: set[int] = set()
    end_s = time.monotonic() + limit_s
    while left := pids() - {os.getpid()}:
        if time.monotonic() > end_s:
            return False
        for pid in left - told:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        told = left if each_once else set()
        time.sleep(0.02)
    return True


def _group(leader: int) -> set[int]:
    def is_member(pid: int) -> bool:
        with suppress(ProcessLookupError):
            return os.getpgid(pid) == leader
        return False

    return {pid for pid in all_alive() if is_member(pid)}
