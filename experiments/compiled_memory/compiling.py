# SPDX-License-Identifier: Apache-2.0
"""Compiles the passes of cells and records the compilers' figures of their memory.

Owns the rows: the cell, the temporary bytes of every pass, and the padding of
arguments. Does not own our own figures, which are computed anew when rows are judged,
nor reading a TPU compiler's heaps (`heaps.py`).
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax

from experiments.compile.__main__ import Compiler
from experiments.compile.compiling import (
    argument_bytes,
    first_line,
    start_jax,
    temp_bytes,
    versions,
)
from experiments.compile.kernels import is_other_choice
from experiments.compile.targets import TARGETS, installed
from experiments.compiled_memory.cells import (
    HOST,
    MemoryCell,
    backend_of,
    passes_of,
    stage_state,
)
from experiments.compiled_memory.heaps import dump_heaps, heap_bytes
from hetjax.mesh.process_setup import simulate_devices
from hetjax.runtime.execution.compiled_bytes import live_bytes

Row = dict[str, Any]
MOST_DEVICES = 8


def cell_of(row: Row) -> MemoryCell:
    """Return the cell of a row."""
    choices: Row = {field.name: row[field.name] for field in fields(MemoryCell)}
    choices["mesh"] = tuple(row["mesh"])
    return MemoryCell(**choices)


def rows_of(path: Path) -> dict[MemoryCell, Row]:
    """Return the rows of a file, the last for each cell."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {cell_of(row): row for row in map(json.loads, lines)}


def run(path: Path, cells: Sequence[MemoryCell], targets: Sequence[str]) -> None:
    """Compile those cells of these targets that the file lacks; append their rows."""
    known = rows_of(path)
    wanted = [cell for cell in cells if cell not in known]
    for target in targets:
        own = [cell for cell in wanted if cell.target == target]
        if own:
            _run_target(path, target, own)


def available(target: str) -> bool:
    """Return whether the compiler of the target is installed."""
    return target == HOST or installed(TARGETS[target]) is not None


def _run_target(path: Path, target: str, cells: Sequence[MemoryCell]) -> None:
    compiler = Compiler(target, serve)
    try:
        for cell in cells:
            row = asdict(cell) | compiler.compile(cell)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), file=sys.stderr, flush=True)
    finally:
        compiler.stop()


def serve(connection: Connection, target: str) -> None:
    """Answer every cell of the target with its record, until None arrives."""
    os.nice(19)
    if target == HOST:
        simulate_devices(MOST_DEVICES)
    if backend_of(target) == "tpu":
        dump_heaps()
    start_jax()
    devices = jax.devices() if target == HOST else TARGETS[target].devices()
    while (cell := connection.recv()) is not None:
        connection.send(record(cell, devices))


def record(cell: MemoryCell, devices: Sequence[jax.Device]) -> Row:
    """Compile the cell's passes; return the compiler's bytes, or why there are none."""
    started = time.perf_counter()
    found: Row = {"failures": []} | _versions(cell.target)
    try:
        passes = passes_of(cell, stage_state(cell, list(devices)))
        found |= _memory(passes) | _live(passes, cell.target)
    except Exception as error:  # a failed compilation gives no memory figures
        found["failures"] = [first_line(error)]
    return found | {"seconds": round(time.perf_counter() - started, 1)}


def _memory(passes: dict[str, Any]) -> Row:
    padding = {
        name: program.memory_analysis().argument_size_in_bytes - argument_bytes(program)
        for name, program in passes.items()
    }
    return {
        "temp_bytes": {name: temp_bytes(program) for name, program in passes.items()},
        "padding_bytes": max(padding.values()),
        "other_choices": sum(map(is_other_choice, passes.values())),
    }


def _live(passes: Mapping[str, Any], target: str) -> Row:
    """Return, for a TPU's programs, the heaps as `temp_bytes`, the larger figures of
    `memory_analysis` as `reported_bytes`, and the bytes that live at once."""
    if backend_of(target) != "tpu":
        return {}
    return {
        "temp_bytes": {name: heap_bytes(each) for name, each in passes.items()},
        "reported_bytes": {name: temp_bytes(each) for name, each in passes.items()},
        "live_bytes": {name: live_bytes(each) for name, each in passes.items()},
    }


@cache
def _versions(target: str) -> Row:
    if target == HOST:
        return {"jax": jax.__version__, "compiler": version("jaxlib")}
    return versions(target)
