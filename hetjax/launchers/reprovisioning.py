# SPDX-License-Identifier: Apache-2.0
"""Runs a command of the user to get machines, while nodes of a run are missing.

The command is typed, never read from a file, and runs without a shell. It gets the
missing nodes as one line of JSON on standard input. One command runs at a time, each
within a timeout. While nodes stay missing it runs again, after a pause that doubles, up
to a limit per hour. Owns when it runs. Does not own which nodes are missing
(`by_joining.py` at first, then `training/recovery/membership.py`), nor how a machine
becomes a node (the launchers).
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hetjax.cluster.cluster import Node
from hetjax.errors import BadInput
from hetjax.launchers.table import LAUNCHERS

Missing = Callable[[], Sequence[Node]]
Follow = Callable[[Missing], None]

LOG = "reprovision.log"
_LOOK_S = 1.0
_KEYS = ("name", "device", "count", "hosts", "zone", "spot")


def nothing_missing() -> Sequence[Node]:
    """Return no nodes; serves as `missing` while the run must not request any."""
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The timeout of a command, the pauses between commands, and the most per hour."""

    command_s: float = 900.0
    first_pause_s: float = 60.0
    longest_pause_s: float = 1800.0
    most_per_hour: int = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandEnded:
    """A command that has ended: for which nodes, after `took_s`, and how.

    `code` is its exit code, or minus a signal's number, or None if it did not start.
    """

    nodes: tuple[str, ...]
    took_s: float
    code: int | None
    error: str = ""


def split_command(typed: str | None, launcher: str) -> tuple[str, ...]:
    """Return the words of a command as it was typed; none if none was typed.

    Raises BadInput if it cannot be run, or if the launcher only uses this machine.
    """
    if typed is None:
        return ()
    if LAUNCHERS[launcher].workers_are_here:
        elsewhere = [n for n, row in LAUNCHERS.items() if not row.workers_are_here]
        raise BadInput(
            got=f"--reprovision with --launcher {launcher}",
            allowed="--reprovision where workers are on other machines",
            fix=f"add --launcher {elsewhere[0]} (or {', '.join(elsewhere[1:])}), or "
            "leave --reprovision out",
        )
    try:
        words = tuple(shlex.split(typed))
    except ValueError as error:
        words, why = (), f" ({error})"
    else:
        why = ""
    if words and shutil.which(words[0]) is not None:
        return words
    raise BadInput(
        got=f"--reprovision {typed!r}{why}",
        allowed="a program, on PATH or by its path, and its arguments; it runs without "
        "a shell",
        fix="name a script: --reprovision './ask-for-machines.sh spot'",
    )


class Reprovisioning:
    """Within `with`, runs the command while `missing` returns nodes.

    A separate thread calls `missing`, and calls `on_end` for each command that has
    ended. Output of commands is appended to LOG in `logs`. A command that still runs at
    the end is killed, with all that it has started.
    """

    def __init__(
        self,
        command: Sequence[str],
        missing: Missing,
        on_end: Callable[[CommandEnded], None],
        run_dir: Path,
        logs: Path,
        limits: Limits | None = None,
    ) -> None:
        self._command, self._missing, self._on_end = tuple(command), missing, on_end
        self._run_dir, self._logs = run_dir, logs
        self._limits = limits or Limits()
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(
            target=self._run, name="reprovisioning", daemon=True
        )

    def __enter__(self) -> "Reprovisioning":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def follow(
        self, missing: Missing, on_end: Callable[[CommandEnded], None] | None = None
    ) -> None:
        """From now on, request the nodes that `missing` returns; report to `on_end`.

        `on_end` also gets the end of a command that is already running.
        """
        with self._lock:
            self._missing, self._on_end = missing, on_end or self._on_end

    def close(self) -> None:
        """Ask no more; may be called again."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s, due_s = self._limits.first_pause_s, 0.0
        starts_s: deque[float] = deque(maxlen=self._limits.most_per_hour)
        while not self._over.wait(min(_LOOK_S, self._limits.first_pause_s)):
            nodes, now_s = self._missing(), time.monotonic()
            if not nodes:
                pause_s, due_s = self._limits.first_pause_s, 0.0
            elif now_s >= due_s and not _is_used_up(starts_s, now_s):
                starts_s.append(now_s)
                asked = self._asked(nodes, len(starts_s))
                with self._lock:
                    self._on_end(asked)
                due_s = time.monotonic() + pause_s
                pause_s = min(2 * pause_s, self._limits.longest_pause_s)

    def _asked(self, nodes: Sequence[Node], attempt: int) -> CommandEnded:
        names = tuple(node.name for node in nodes)
        request = {
            "run_dir": str(self._run_dir.absolute()),
            "attempt": attempt,
            "missing": [{key: getattr(node, key) for key in _KEYS} for node in nodes],
        }
        start_s = time.monotonic()
        try:
            code, error = self._code(json.dumps(request, default=str) + "\n")
        except OSError as failed:
            code, error = None, failed.strerror or str(failed)
        took_s = time.monotonic() - start_s
        return CommandEnded(nodes=names, took_s=took_s, code=code, error=error)

    def _code(self, request: str) -> tuple[int, str]:
        self._logs.mkdir(parents=True, exist_ok=True)
        with (self._logs / LOG).open("ab") as log:
            running = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group that can be killed as a whole
            )
        assert running.stdin is not None
        with suppress(BrokenPipeError), running.stdin:  # a command that does not read
            running.stdin.write(request.encode())
        return self._waited(running)

    def _waited(self, running: subprocess.Popen[bytes]) -> tuple[int, str]:
        end_s = time.monotonic() + self._limits.command_s
        while not self._over.is_set() and time.monotonic() < end_s:
            with suppress(subprocess.TimeoutExpired):
                return running.wait(min(_LOOK_S, self._limits.command_s)), ""
        is_late = not self._over.is_set()
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        error = (
            f"timeout of {self._limits.command_s:g} s" if is_late else "end of the run"
        )
        return running.wait(), error


def _is_used_up(starts_s: deque[float], now_s: float) -> bool:
    return len(starts_s) == starts_s.maxlen and now_s - starts_s[0] < 3600.0
