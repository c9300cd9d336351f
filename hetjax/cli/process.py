# SPDX-License-Identifier: Apache-2.0
"""Runs a command's process, from its first import to its exit: signals and streams.

A command takes seconds to import, and a signal meanwhile must not show a traceback, so
this file imports only the standard library. Owns the default handlers of SIGINT,
SIGTERM and SIGHUP, and discards output whose reader has left. Does not own errors and
their exit codes (`command.py`).
"""

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from types import FrameType
from typing import Any, Protocol

INTERRUPTED, TERMINATED = 1, 143  # exit codes after SIGINT and SIGTERM
_UNDONE = {
    "train": "before the run began: nothing was done",
    "profile": "before all was measured: the same command measures what is missing",
}
_SHOW_CURSOR = "\x1b[?25h"
_READER_LEFT = (errno.EPIPE, errno.EIO)  # of a pipe, of a terminal
_Run = Callable[[Sequence[str]], int]


class Main(Protocol):
    """Runs a command and returns its exit code. Without arguments it takes those of the
    process."""

    def __call__(self, arguments: Sequence[str] | None = None) -> int: ...


def command_main(name: str) -> Main:
    """Return the `main` of `python -m hetjax.NAME`."""
    return process_main(
        lambda arguments: import_module(f"hetjax.cli.{name}").main(arguments), name
    )


def process_main(run: _Run, name: str | None = None) -> Main:
    """Return the `main` of a process that runs this command.

    Without a name, the first argument names the command. A call of `main` with
    arguments comes from Python code, whose signals and streams stay as they are.
    """

    def main(arguments: Sequence[str] | None = None) -> int:
        if arguments is not None:
            return run(arguments)
        first = name or "".join(sys.argv[1:2])
        signals_say(_UNDONE.get(first, "before it was done"))
        signals = _Signals()
        outlive_readers()
        if os.environ.get("NO_COLOR"):  # only the help printer ignores it
            os.environ.setdefault("PYTHON_TYRO_ANSI_CODES", "False")
        code: Any = 1
        try:
            code = run(sys.argv[1:])
        except SystemExit as ended:
            code = ended.code or 0
            raise
        finally:
            sys.stdout.flush()
            signals.exit_code = code if isinstance(code, int) else 1
        if _ends_at_once:
            sys.stderr.flush()
            os._exit(signals.exit_code)
        return code

    return main


_said = ""  # global, because signals go to the whole process


def signals_say(how: str) -> None:
    """Set the last words of the message that a fatal signal prints from now on."""
    global _said
    _said = how


_ends_at_once = False


def end_at_once() -> None:
    """End the process right after its command, whatever threads and libraries still do:
    one that hangs would keep the process alive."""
    global _ends_at_once
    _ends_at_once = True


class _Signals:
    """Handlers that end the process at once instead of raising: an exception could
    interrupt an import, or come where Python can only print it.

    SIGHUP is ignored, because files may still have to be written without a terminal.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None  # set once only the exit is left
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # ignored in the background
                signal.signal(number, self._end)
        if hasattr(signal, "SIGHUP"):
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self.exit_code is not None:
            os._exit(self.exit_code)
        name = signal.Signals(number).name
        cursor = _SHOW_CURSOR if os.isatty(2) else ""  # a live line hides the cursor
        text = f"{cursor}\nhetjax: ended by {name} {_said}\n"
        with suppress(OSError):  # no `print`: the signal may have interrupted one
            os.write(2, text.encode())
        os._exit(INTERRUPTED if number == signal.SIGINT else TERMINATED)


def outlive_readers() -> None:
    """Silently discard output to pipes and terminals whose reader has left.

    Descriptors that were closed from the start become the null device. Otherwise the
    next opened file would get such a number, and the printed output.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            _silence(descriptor)
    sys.stdout = _outliving(sys.stdout, 1)
    sys.stderr = _outliving(sys.stderr, 2)


def _silence(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)


class _OutlivingFile(io.FileIO):
    """A descriptor that becomes the null device when its reader has left."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _READER_LEFT:
                raise
            _silence(self.fileno())
            return len(data)


def _outliving(stream: Any, descriptor: int) -> io.TextIOWrapper:
    """Return the stream (None: it was closed) on top of an `_OutlivingFile`."""
    file = _OutlivingFile(descriptor, "w", closefd=False)
    is_unbuffered = stream is not None and stream.write_through
    return io.TextIOWrapper(
        file if is_unbuffered else io.BufferedWriter(file),  # type: ignore[arg-type]
        encoding=stream and stream.encoding,
        errors=stream and stream.errors,
        line_buffering=descriptor == 2 or file.isatty(),
        write_through=is_unbuffered,
    )
