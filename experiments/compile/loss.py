# SPDX-License-Identifier: Apache-2.0
"""Measures the memory of the loss over a large vocabulary, for devices not here.

    python -m experiments.compile.loss --output FILE [--targets v5e H100 cpu ...]
    python -m experiments.compile.loss --table FILE

Loss and gradients of 8,192 positions x 128,256 words x a width of 4,096 (Llama-3 8B),
in blocks and with all logits kept, the table whole or cut over two devices. The first
command appends a line of JSON per program to the file, and skips programs that the file
has. The second prints the file as Markdown. `temp_bytes` is what the compiler needs on
each device beside inputs and outputs: the residual stream, the table, and their
gradients.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.compile.compiling import commit
from experiments.compile.hlo import collectives
from experiments.compile.targets import TARGETS
from hetjax.models import cross_entropy

POSITIONS, WORDS, WIDTH = 8_192, 128_256, 4_096
CPU = {"cpu": "float32", "cpu, bfloat16": "bfloat16"}
FORMS = {"in blocks": cross_entropy.WHOLE_BYTES, "all logits": 2**62}
GIB = 2**30

Row = dict[str, Any]


def row(target: str, form: str, tensor: int) -> Row:
    """Compile loss and gradients with the table cut over `tensor` devices."""
    devices = jax.devices("cpu") if target in CPU else TARGETS[target].devices()
    dtype = CPU[target] if target in CPU else TARGETS[target].dtype
    mesh = Mesh(np.array(devices[:tensor]), ("tensor",))
    whole = NamedSharding(mesh, PartitionSpec())
    cut = NamedSharding(mesh, PartitionSpec("tensor"))
    inputs = (
        jax.ShapeDtypeStruct((1, POSITIONS, WIDTH), dtype, sharding=whole),
        jax.ShapeDtypeStruct((WORDS, WIDTH), dtype, sharding=cut),
        jax.ShapeDtypeStruct((1, POSITIONS), jnp.int32, sharding=whole),
    )
    cross_entropy.WHOLE_BYTES = FORMS[form]
    # a new function: JAX would reuse its trace of the other form
    step = jax.jit(
        lambda *given: jax.value_and_grad(_loss, argnums=(0, 1))(*given),
        out_shardings=(whole, (whole, cut)),
    )
    program = step.lower(*inputs).compile()
    memory: Any = program.memory_analysis()
    return {
        "target": target,
        "form": form,
        "tensor": tensor,
        "dtype": dtype,
        "temp_bytes": memory.temp_size_in_bytes,
        "input_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "collectives": dict(collectives(program.as_text() or "")),
        "jax": jax.__version__,
        "commit": commit(),
    }


def _loss(y_BLD: jax.Array, table_VD: jax.Array, targets_BL: jax.Array) -> jax.Array:
    terms = cross_entropy.LossTerms(WORDS)
    return cross_entropy.cross_entropy(y_BLD, table_VD, targets_BL, terms=terms)


def rows_of(path: Path) -> list[Row]:
    """Return the rows of a file."""
    if not path.exists():
        return []
    return list(map(json.loads, path.read_text(encoding="utf-8").splitlines()))


def run(path: Path, targets: Sequence[str]) -> None:
    """Compile what the file does not have."""
    done = {(r["target"], r["form"], r["tensor"]) for r in rows_of(path)}
    for case in product(targets, FORMS, (1, 2)):
        if case not in done:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row(*case)) + "\n")


def markdown(rows: Sequence[Row]) -> str:
    """Return a table of the targets that are complete, in GiB per device."""
    known = {(r["target"], r["form"], r["tensor"]): r for r in rows}
    lines = [
        "|  | precision | in blocks | table cut over 2 | all-reduces | all logits |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for target in dict.fromkeys(r["target"] for r in rows):
        if all((target, *case) in known for case in product(FORMS, (1, 2))):
            lines.append(f"| {target} | " + " | ".join(_cells(known, target)) + " |")
    return "\n".join(lines) + "\n"


def _cells(known: dict[tuple[str, str, int], Row], target: str) -> Iterator[str]:
    cut = known[target, "in blocks", 2]
    assert set(cut["collectives"]) == {"all-reduce"}, cut
    yield cut["dtype"]
    yield f"{known[target, 'in blocks', 1]['temp_bytes'] / GIB:.2f}"
    yield f"{cut['temp_bytes'] / GIB:.2f}"
    yield f"{cut['collectives']['all-reduce']} per block"
    yield f"{known[target, 'all logits', 1]['temp_bytes'] / GIB:.2f}"


def main() -> None:
    """Compile, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path)
    names = [*TARGETS, *CPU]
    parser.add_argument("--targets", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    if options.table is not None:
        print(markdown(rows_of(options.table)), end="")
        return
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    run(options.output, options.targets)


if __name__ == "__main__":
    main()
