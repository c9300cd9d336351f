# SPDX-License-Identifier: Apache-2.0
"""Compiles the programs of stages for accelerators that are not here.

    python -m experiments.compile --output FILE [--targets v5e H100 ...] [--limit N]
        [--programs update pack ...] [--again failed | older]
    python -m experiments.compile --table FILE

The first command needs the targets' compilers (`pip install 'jax[tpu]'`,
`'jax[cuda12]'`), but no device. It appends a line of JSON per program to the file, and
skips programs that the file has. So it can be stopped and started again, and run once
per environment if compilers need separate ones. With --again it recompiles programs
that failed, or whose rows are from another commit of the package; a program's last row
counts. The second command prints the file as Markdown.

Owns the run: a process per target, because a compiler that crashes takes its process
with it, and a time limit for each program.
"""

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, get_args

from experiments.compile.cells import PROGRAMS, Cell, covering
from experiments.compile.compiling import commit, serve, versions
from experiments.compile.table import markdown
from experiments.compile.targets import TARGETS, installed

LIMIT_S = 600
Again = Literal["failed", "older"]
Serve = Callable[[Connection, str], None]


class Compiler:
    """A process that compiles for one target; a new one replaces it if it dies.

    It runs `serve`, which answers the cells that come over a connection.
    """

    def __init__(self, target: str, serve: Serve = serve) -> None:
        self.target, self._serve = target, serve
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=self._serve, args=(theirs, self.target))
        self._process.start()
        theirs.close()

    def compile(self, cell: Any) -> dict[str, Any]:
        """Return the cell's record, or the reason why there is none."""
        try:
            self._connection.send(cell)
            if self._connection.poll(LIMIT_S):
                return self._connection.recv()
            why = f"not compiled within {LIMIT_S} s"
        except (EOFError, OSError):
            self._process.join()
            why = f"the compiler died with exit code {self._process.exitcode}"
        self.stop()
        self._start()
        return {"failures": [why]}

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def identity(row: dict[str, Any]) -> str:
    """Return the key of a cell, given its row or the cell as a dict."""
    names = ("target", "program", "model", "mesh", "remat", "place", "part")
    return json.dumps([row[name] for name in names])


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, the last for each cell."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = map(json.loads, lines)
    return list({identity(row): row for row in rows}.values())


def wanted(
    path: Path, targets: Sequence[str], programs: Sequence[str], again: Again | None
) -> Iterator[Cell]:
    """Yield the cells that the file lacks, or that `again` selects."""
    done = {identity(row) for row in rows_of(path) if not _is_left(row, again)}
    for cell in covering():
        if cell.target in targets and cell.program in programs:
            if identity(asdict(cell)) not in done:
                yield cell


def _is_left(row: dict[str, Any], again: Again | None) -> bool:
    match again:
        case "failed":
            return bool(row["failures"])
        case "older":
            return row.get("commit") != commit()
    return False


def run(path: Path, cells: Sequence[Cell]) -> None:
    """Compile the cells, target by target."""
    for target in dict.fromkeys(cell.target for cell in cells):
        _run_target(path, target, [cell for cell in cells if cell.target == target])


def _run_target(path: Path, target: str, cells: list[Cell]) -> None:
    compiler = Compiler(target)
    try:
        for cell in cells:
            row: dict[str, Any] = asdict(cell)
            row |= compiler.compile(cell) | versions(target)
            row["day"] = datetime.now(UTC).date().isoformat()
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            told = "; ".join(row["failures"]) or "passed"
            print(
                f"{identity(row)} {row.get('seconds')} s: {told}",
                file=sys.stderr,
                flush=True,
            )
    finally:
        compiler.stop()


def main() -> None:
    """Compile, or print the table."""
    parser = argparse.ArgumentParser(description="Compile for accelerators not here")
    parser.add_argument("--output", type=Path, help="rows are appended to this file")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--limit", type=int, help="compile so many programs at most")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--again", choices=get_args(Again), help="recompile these")
    parser.add_argument("--table", type=Path, help="print this file as Markdown")
    given = parser.parse_args()
    if given.table:
        print(markdown(rows_of(given.table)))
        return
    if given.output is None:
        parser.error("give --output FILE, or --table FILE")
    here = [name for name in given.targets if installed(TARGETS[name])]
    for name in given.targets:
        if name not in here:
            print(f"{name}: no {TARGETS[name].compiler} here", file=sys.stderr)
    cells = wanted(given.output, here, given.programs, given.again)
    run(given.output, list(cells)[: given.limit])


if __name__ == "__main__":
    main()
