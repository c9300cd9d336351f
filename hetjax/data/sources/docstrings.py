# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.data.sources.docstrings`: the long docstrings of Python files.

Owns the parsing, which never imports a file. A first start waits longest for it, so
there is a process for each core, up to a limit. Does not own which files are read
(`corpus.py`). Started by `docstrings`; not meant to be typed.
"""

import ast
import json
import os
import re
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from hetjax.files.parsing import json_value

_MIN_DOCSTRING_CHARS = 200
_MOST_PROCESSES = 4  # more would wait for the disk
_Owner = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")  # of statements
SURROGATE = re.compile("[\ud800-\udfff]")


def docstrings(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the docstrings of more than 200 characters, file by file in this order."""
    count = min(_MOST_PROCESSES, os.cpu_count() or 1)
    with ExitStack() as stack:
        parsers = [_started(paths[n::count], stack) for n in range(count)]
        found = [answer() for answer in parsers]
    for n in range(len(paths)):
        yield from found[n % count][n // count]


def _started(paths: Sequence[Path], stack: ExitStack) -> Callable[[], list[list[str]]]:
    """Start a process for these files; the returned function waits for its answer."""
    asked, answers = (stack.enter_context(TemporaryFile()) for _ in range(2))
    asked.write(json.dumps([*map(str, paths)]).encode())
    asked.seek(0)
    process = subprocess.Popen(
        [sys.executable, "-m", "hetjax.data.sources.docstrings"],
        stdin=asked,
        stdout=answers,
        start_new_session=True,  # Ctrl-C is for the run alone
    )
    stack.enter_context(process)
    stack.callback(process.kill)

    def answer() -> list[list[str]]:
        if process.wait():
            raise ChildProcessError("the reader of docstrings failed: see above")
        answers.seek(0)
        return json_value(answers.read())

    return answer


def of_file(path: Path) -> list[str]:
    """Return the long docstrings of one file, in the order of `ast.walk`."""
    with warnings.catch_warnings():
        # Our users need no warnings of invalid escapes in other people's code.
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return []  # templates and files for other versions of Python
    found = [ast.get_docstring(owner) or "" for owner in _owners(tree)]
    return [
        text
        for text in found
        if len(text) > _MIN_DOCSTRING_CHARS and not SURROGATE.search(text)
    ]


def _owners(tree: ast.Module) -> Iterator[_Owner]:
    """Yield all nodes that can have a docstring, in the order of `ast.walk`.

    `ast.walk` visits every expression, too, and takes many times as long.
    """
    waiting: deque[Any] = deque([tree])
    while waiting:
        node = waiting.popleft()
        if isinstance(node, _Owner):
            yield node
        for block in _BLOCKS:
            waiting.extend(getattr(node, block, ()))


def main() -> None:
    """Answer standard input, a list of paths, with the docstrings of each."""
    paths = json_value(sys.stdin.buffer.read())
    answer = json.dumps([of_file(Path(path)) for path in paths])
    sys.stdout.buffer.write(answer.encode())


if __name__ == "__main__":
    main()
