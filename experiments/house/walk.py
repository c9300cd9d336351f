# SPDX-License-Identifier: Apache-2.0
"""Counts the functions and files that a reader visits when following a call.

    python -m experiments.house.walk train   # from the command to the first step
    python -m experiments.house.walk plan    # from find_plan to its bound

Needs Python 3.12. Every function counts once, where it is called first. Prints JSON:
the number of `functions`, the numbers of `files` and `rooms` that they are in, and
`returns`: how often the walk comes back to a file that it had left.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

import hetjax

ROOT = Path(hetjax.__file__).parent


class _Arrived(BaseException):
    """The walk is at its end."""


class Walk:
    """The functions of hetjax that are called, until `ends_at` is one of them."""

    def __init__(self, ends_at: tuple[str, str] | None = None) -> None:
        self.ends_at = ends_at  # a file, below hetjax/, and a function
        self.files: list[str] = []  # of each function, in the order of first calls

    def follow(self, call: Callable[[], object]) -> dict[str, int]:
        """Follow a call and return the counts."""
        watching = _monitoring()
        watching.use_tool_id(watching.PROFILER_ID, "walk")
        start = watching.events.PY_START
        watching.register_callback(watching.PROFILER_ID, start, self._entered)
        watching.set_events(watching.PROFILER_ID, start)
        with suppress(_Arrived):
            call()
        watching.set_events(watching.PROFILER_ID, watching.events.NO_EVENTS)
        watching.free_tool_id(watching.PROFILER_ID)
        befores = [None, *self.files]
        moves = [a for a, b in zip(self.files, befores, strict=False) if a != b]
        distinct = {*self.files}
        return {
            "functions": len(self.files),
            "files": len(distinct),
            "rooms": len({file.split("/")[0] for file in distinct}),
            "returns": len(moves) - len(distinct),
        }

    def _entered(self, code: CodeType, offset: int) -> object:
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT) and not code.co_name.startswith("<"):
            file = path.relative_to(ROOT).as_posix()
            self.files.append(file)
            if (file, code.co_name) == self.ends_at:
                raise _Arrived
        return _monitoring().DISABLE


def _monitoring() -> Any:
    return vars(sys)["monitoring"]  # type checkers of Python 3.11 do not know it


def train() -> dict[str, int]:
    from hetjax.train import main

    with tempfile.TemporaryDirectory() as folder:
        words = ["tiny", "--steps", "1", "--run-dir", f"{folder}/run"]
        walk = Walk(("runtime/control/controller.py", "step"))
        return walk.follow(lambda: main(words))


def plan() -> dict[str, int]:
    cluster = hetjax.load_cluster("tiny")
    return Walk().follow(
        lambda: hetjax.find_plan("tiny", cluster=cluster, global_batch=8, seq_len=32)
    )


if __name__ == "__main__":
    print(json.dumps({"train": train, "plan": plan}[sys.argv[1]]()))
