# SPDX-License-Identifier: Apache-2.0
"""A file of JSON lines that survives being cut off at any byte.

Owns appending, and truncation to a step on resume. Does not own what lines mean
(`loop.py`).
"""

import json
import os
import threading
from io import FileIO
from pathlib import Path
from typing import Any

from hetjax.cluster.record import naming, parsed, read_text, write_whole
from hetjax.errors import BadInput


class Journal:
    """Appends objects to a file, one flushed line each; each line has a `step`."""

    def __init__(self, path: Path, *, last_step: int) -> None:
        """Open the file, without the lines of steps after `last_step`."""
        self._path, self._lock = path, threading.Lock()
        self._file, _ = self._without_later(last_step)

    def rewind(self, last_step: int) -> list[dict[str, Any]]:
        """Drop the lines of steps after `last_step`, and return them."""
        self._file.close()
        self._file, dropped = self._without_later(last_step)
        return dropped

    def _without_later(self, last_step: int) -> tuple[FileIO, list[dict[str, Any]]]:
        lines = read_journal(self._path)
        kept = [line for line in lines if line["step"] <= last_step]
        write_whole(self._path, "".join(map(_text, kept)))
        dropped = [line for line in lines if line["step"] > last_step]
        return FileIO(self._path, "a"), dropped

    def append(self, line: dict[str, Any]) -> None:
        """Write one line now, from any thread; numbers must be finite.

        Where there is no room for all of it, nothing is written: an OSError says so.
        """
        data = _text(line).encode()
        with self._lock, naming(self._path):
            end = self._file.seek(0, os.SEEK_END)
            try:
                while data:
                    data = data[self._file.write(data) :]
            except OSError:
                self._file.truncate(end)
                raise

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of the file; a last one that was cut off is left out.

    BadInput names the first line that is none of ours.
    """
    if not path.exists():
        return []
    lines = read_text(path, what="journal of the run").split("\n")[:-1]
    numbered = enumerate(lines, start=1)
    return [_line(line, f"{path}, line {n}") for n, line in numbered if line]


def _line(text: str, where: str) -> dict[str, Any]:
    allowed = "lines as hetjax wrote them: JSON objects with a 'step'"
    fix = "remove or restore that line, or give another --run-dir"
    line = parsed(text, json.loads, what=f"JSON in {where}", allowed=allowed, fix=fix)
    if not (isinstance(line, dict) and type(line.get("step")) is int):
        got = f"{where}: no JSON object with a 'step'"
        raise BadInput(got=got, allowed=allowed, fix=fix)
    return line


def _text(line: dict[str, Any]) -> str:
    return json.dumps(line, allow_nan=False) + "\n"
