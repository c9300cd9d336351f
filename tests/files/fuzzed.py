# SPDX-License-Identifier: Apache-2.0
"""Reads changed files one after the other and prints the outcome of each.

    python -m tests.files.fuzzed FIRST NUMBER [KIND]

Seed N makes change N, to a kind of file that N selects, so a number reproduces a
finding. Runs in a separate process with limits: anything that takes more than 5 CPU
seconds, a minute, or 1 GB more than before, is a finding. The last line is a table of
outcomes as JSON.
"""

import gc
import json
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetjax.checkpoint.stores.store import CorruptData
from hetjax.errors import BadInput
from hetjax.runtime.rpc.encoding import BadMessage
from tests.files.file_kind import FileKind
from tests.files.file_kinds import KINDS
from tests.files.mutations import mutate

MOST_CPU_S, MOST_S, MOST_BYTES = 5.0, 60.0, 1 << 30
_LONGEST_ERROR = 12_100  # characters
SOUND = ("refused", "undamaged", "the one before", "as it says")


class _TookTooLong(BaseException):
    pass


class Fuzzed:
    """Valid files of each kind, made when a kind is first changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, tuple[Path, Any]] = {}

    def outcome(self, seed: int, only: str | None = None) -> tuple[str, str, str]:
        """Change a file and read it; return the kind, the change and the outcome."""
        rng = random.Random(seed)
        name = only or rng.choice([*KINDS])
        kind = KINDS[name]
        folder, sound = self._sound(name)
        target = folder / kind.target
        kept = target.read_bytes()
        try:
            how = mutate(target, rng, kind.seal, kind.kinds_of_file)
            return name, how, _read(kind, folder, sound)
        finally:
            _put_back(target, kept)

    def _sound(self, name: str) -> tuple[Path, Any]:
        if name not in self._made:
            folder = self._folder / re.sub("[^a-zA-Z.0-9]", "_", name)
            folder.mkdir()
            KINDS[name].make(folder)
            kept = (folder / KINDS[name].target).read_bytes()
            self._made[name] = folder, repr(KINDS[name].read(folder))
            _put_back(folder / KINDS[name].target, kept)
        return self._made[name]


def _put_back(path: Path, data: bytes) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _read(kind: FileKind, folder: Path, sound: str) -> str:
    try:
        with _limited():
            found = repr(kind.read(folder))
    except (BadInput, CorruptData, BadMessage) as error:
        told = _refusal(error)
        must_fall_back = kind.hashed and told == "refused"
        return f"no step before: {error}" if must_fall_back else told
    except MemoryError:
        return "more than 1 GB"
    except _TookTooLong as late:
        return f"{late}\n{traceback.format_exc()}"
    except BaseException as error:  # a library's panic is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return traceback.format_exc()
    if found == sound:
        return "undamaged"
    if kind.hashed or kind.seal:
        if found.startswith("(10,"):
            return "the one before"
        if kind.hashed:
            return f"believed: {found[:300]}"
    return "as it says"


def _refusal(error: Exception) -> str:
    """Return what a user reads: three parts, or the fault that a caller handles."""
    parts = [str(error)]
    if isinstance(error, BadInput):
        parts = [error.got, error.allowed, error.fix]
    if not all(part.strip() for part in parts):
        return f"not in three parts: {parts}"
    if sum(map(len, parts)) > _LONGEST_ERROR:
        return f"too long an error: {parts[0][:300]}"
    try:
        "".join(parts).encode()
    except UnicodeEncodeError:
        return f"an error that cannot be printed: {parts!r}"
    return "refused"


@contextmanager
def _limited() -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        unit = "CPU s" if number == signal.SIGPROF else "s"
        raise _TookTooLong(f"more than the limit of {unit}")

    for number, timer, most in (
        (signal.SIGPROF, signal.ITIMER_PROF, MOST_CPU_S),
        (signal.SIGALRM, signal.ITIMER_REAL, MOST_S),
    ):
        signal.signal(number, late)
        signal.setitimer(timer, most)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_size_bytes() + MOST_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)


def _size_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def main() -> None:
    first, number, *only = sys.argv[1:]
    warnings.simplefilter("ignore")
    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        fuzzed = Fuzzed(Path(scratch))
        for seed in range(int(first), int(first) + int(number)):
            name, how, outcome = fuzzed.outcome(seed, *only)
            is_sound = outcome in SOUND
            counts.setdefault(name, Counter())[outcome if is_sound else "FOUND"] += 1
            if not is_sound:
                found = {"seed": seed, "kind": name, "how": how, "outcome": outcome}
                print(json.dumps(found), flush=True)
            gc.collect(0)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
