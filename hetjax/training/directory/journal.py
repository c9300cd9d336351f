# SPDX-License-Identifier: Apache-2.0
"""Writes and reads a run's journals: JSON lines that may be cut off at any byte.

Owns `metrics.jsonl` and `events.jsonl` as files. Does not own which values a line may
have (`journal_lines.py`) nor who writes them (`training/recorder.py`).
"""

import json
import os
import threading
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

from hetjax.errors import BadInput
from hetjax.files.parsing import json_value, parsed
from hetjax.files.reading import read_text
from hetjax.files.writing import naming, write_whole
from hetjax.training.directory.journal_lines import OF_AN_EVENT, wrong_with
from hetjax.training.directory.rundir import EVENTS

_JOURNAL_BYTES = 1 << 30


class Journal:
    """Appends objects to a file, one flushed line each; each line has a `step`."""

    def __init__(
        self,
        path: Path,
        *,
        last_step: int,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the file, without the lines of steps after `last_step`.

        `may_write` raises if lines may no longer be written or dropped.
        """
        self._path, self._lock, self._may_write = path, threading.Lock(), may_write
        self.observed: Callable[[dict[str, Any]], None] = lambda line: None
        may_write()
        self._file, _ = self._without_later(last_step)

    def rewind(self, last_step: int) -> list[dict[str, Any]]:
        """Drop the lines of steps after `last_step`, and return them."""
        self._may_write()
        self.write_again()
        self._file.close()
        self._file, dropped = self._without_later(last_step)
        return dropped

    def _without_later(self, last_step: int) -> tuple[FileIO, list[dict[str, Any]]]:
        lines = read_journal(self._path)
        kept = [line for line in lines if line["step"] <= last_step]
        write_whole(self._path, "".join(map(_text, kept)))
        dropped = [line for line in lines if line["step"] > last_step]
        return FileIO(self._path, "a+"), dropped

    def write_again(self) -> None:
        """Write all lines to a new file if the file has been removed."""
        with self._lock:
            if self._path.exists():
                return
            self._file.seek(0)
            write_whole(self._path, self._file.readall().decode())
            self._file.close()
            self._file = FileIO(self._path, "a+")

    def append(self, line: dict[str, Any]) -> None:
        """Write one line now, from any thread; numbers must be finite.

        If there is no room for all of it, write nothing and raise OSError.
        """
        self._may_write()
        data = _text(line).encode()
        with self._lock, naming(self._path):
            end = self._file.seek(0, os.SEEK_END)
            try:
                while data:
                    data = data[self._file.write(data) :]
            except OSError:
                self._file.truncate(end)
                raise
        self.observed(line)

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of the file, without a last one that was cut off.

    Raises BadInput that names the first line which hetjax cannot have written.
    """
    if not path.exists():
        return []
    text = read_text(path, what="journal of the run", most_bytes=_JOURNAL_BYTES)
    numbered = enumerate(text.split("\n")[:-1], start=1)
    required = OF_AN_EVENT if path.name == EVENTS else ()
    return [_line(line, f"{path}, line {n}", required) for n, line in numbered if line]


def _line(text: str, where: str, required: tuple[str, ...]) -> dict[str, Any]:
    allowed = "lines as hetjax wrote them: JSON objects with a 'step'"
    fix = "remove or restore that line, or give another --run-dir"
    line = parsed(text, json_value, what=f"JSON in {where}", allowed=allowed, fix=fix)
    if wrong := wrong_with(line, required):
        raise BadInput(got=f"{where}: {wrong}", allowed=allowed, fix=fix)
    return line


def _text(line: dict[str, Any]) -> str:
    return json.dumps(line, allow_nan=False) + "\n"
