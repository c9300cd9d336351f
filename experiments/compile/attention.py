# SPDX-License-Identifier: Apache-2.0
"""Measures attention's memory, form by form, on a CPU and on accelerators not here.

    python -m experiments.compile.attention --output FILE [--targets H100 v5e ...]
    python -m experiments.compile.attention --table FILE

One sequence of Llama-3-8B's heads (32 of 128, 8 of keys), forward and backward in one
program, on one device: the compiler's temporary bytes besides operands and results.
The first command appends a line of JSON per program and skips programs that the file
has; each target has its own process. The second prints the file as Markdown.
"""

import argparse
import json
import multiprocessing
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from experiments.compile.compiling import commit, start_jax
from experiments.compile.targets import TARGETS, Host, Target, installed
from hetjax.models.attention.attention import AttentionForm, attend

DEVICES: dict[str, Target] = {**TARGETS, Host().name: Host()}
LENGTHS = (2_048, 8_192, 32_768)  # positions
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 32, 8, 128
_KERNEL = re.compile(r'custom_call_target="(?:__cudnn|tpu_custom_call)[^"]*"')


def forms(target: str) -> tuple[AttentionForm, ...]:
    """Return the forms that the target has, its default first."""
    best = DEVICES[target].attention
    return (best,) if best == "chunked" else (best, "chunked")


def record(target: str, form: AttentionForm, length: int) -> dict[str, Any]:
    """Compile one program and return its figures."""
    start_jax()
    on = SingleDeviceSharding(DEVICES[target].devices()[0])
    heads = NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS
    dtype = DEVICES[target].dtype
    given = [
        jax.ShapeDtypeStruct((1, length, n, HEAD_SIZE), dtype, sharding=on)
        for n in heads
    ]

    def passes(q: jax.Array, k: jax.Array, v: jax.Array, dz: jax.Array) -> Any:
        z, vjp = jax.vjp(partial(attend, form=form), q, k, v)
        return z, vjp(dz)

    started = time.perf_counter()
    program = jax.jit(passes).lower(*given).compile()
    text, memory = program.as_text() or "", program.memory_analysis()
    assert memory is not None
    return {
        "dtype": jnp.dtype(dtype).name,
        "temp_bytes": memory.temp_size_in_bytes,
        "kernels": len(_KERNEL.findall(text)),
        "has_square": bool(re.search(rf"\b{length},(?:\d+,)?{length}\b", text)),
        "seconds": round(time.perf_counter() - started, 1),
    }


def run(path: Path, targets: list[str]) -> None:
    """Compile what the file lacks."""
    context = multiprocessing.get_context("spawn")
    done = {(r["target"], r["form"], r["length"]) for r in rows_of(path)}
    for target in targets:
        with context.Pool(1) as compiler:
            for case in _cases(target):
                if case in done:
                    continue
                row = dict(zip(("target", "form", "length"), case, strict=True))
                row |= compiler.apply(record, case) | {"jax": jax.__version__}
                row |= {"compiler": installed(DEVICES[target])}
                row |= {"commit": commit(), "day": f"{datetime.now(UTC).date()}"}
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


def _cases(target: str) -> Iterator[tuple[str, AttentionForm, int]]:
    for form in forms(target):
        for length in LENGTHS:
            yield target, form, length


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return a row per target and form, a column per length, in MiB."""
    found = {(r["target"], r["form"], r["length"]): r for r in rows}
    header = ["", "precision", "attention", *(f"{length:,}" for length in LENGTHS)]
    lines = [header, ["---"] * len(header)]
    for target in DEVICES:
        for form in forms(target):
            own = [found.get((target, form, length)) for length in LENGTHS]
            if any(own):
                cells = [f"{r['temp_bytes'] / 2**20:,.0f}" if r else "" for r in own]
                lines.append([target, DEVICES[target].dtype, form, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Compile, or print the table."""
    parser = argparse.ArgumentParser(description="Compile attention, form by form")
    parser.add_argument("--output", type=Path, help="rows are appended to this file")
    parser.add_argument("--targets", nargs="+", choices=DEVICES, default=list(DEVICES))
    parser.add_argument("--table", type=Path, help="print this file as Markdown")
    given = parser.parse_args()
    if given.table:
        print(markdown(rows_of(given.table)))
    elif given.output is None:
        parser.error("give --output FILE, or --table FILE")
    else:
        run(given.output, [t for t in given.targets if installed(DEVICES[t])])


if __name__ == "__main__":
    main()
