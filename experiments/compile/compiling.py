# SPDX-License-Identifier: Apache-2.0
"""Compiles cells and checks the programs against the stage's needs.

Owns the checks and the record of a cell. Does not own the order of cells, nor the
reaction to a dying compiler (`__main__.py`).
"""

import hashlib
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax

import hetjax
from experiments.compile import kernels
from experiments.compile.cells import PASSES, Cell
from experiments.compile.expected import beyond, most_collectives, most_permuted
from experiments.compile.hlo import (
    aliased_parameters,
    collectives,
    has_type,
    hidden_collectives,
    permuted_numbers,
    products,
    square_arrays,
)
from experiments.compile.stages import (
    OPTIMIZER,
    SEQ_LEN,
    attention_of,
    compiled_programs,
    model_and_plan,
    stage_state,
)
from experiments.compile.targets import TARGETS, compiler_of, installed
from hetjax.cluster.catalogue import catalogue
from hetjax.cluster.discovery import Device, device_name
from hetjax.costs.costs import StageMemory
from hetjax.costs.stage_memory import stage_memory
from hetjax.runtime.execution.stage_state import StageState
from hetjax.stage.arrays import device_bytes

_SIXTEEN_BITS = {"float16": "f16", "bfloat16": "bf16"}  # XLA's names
_OUT_OF_MEMORY = "Ran out of memory"  # from a TPU's compiler; GPU compilers never do


def serve(connection: Connection, target: str) -> None:
    """Answer every cell of the target with its record, until None arrives."""
    os.nice(19)
    start_jax()
    devices = TARGETS[target].devices()
    while (cell := connection.recv()) is not None:
        connection.send(record(cell, devices))


def start_jax() -> None:
    """Configure JAX as the product does; equal programs are then compiled once."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    compile_equal_programs_once()


def compile_equal_programs_once() -> None:
    """Make JAX compile equal programs only once in this process."""
    compile_now, known = jax.stages.Lowered.compile, {}

    def compile_once(self: Any, compiler_options: Any = None, **others: Any) -> Any:
        said = self.as_text(), self.in_tree, self.out_tree, compiler_options, others
        key = hashlib.sha256(repr(said).encode()).digest()
        if key not in known:
            compile_with = partial(compile_now, self, **others)
            known[key] = kernels.compiled(compile_with, compiler_options)
        return known[key]

    jax.stages.Lowered.compile = compile_once


def record(cell: Cell, devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Compile the cell; return its figures, and its faults under `failures`."""
    started = time.perf_counter()
    own = devices[: cell.tensor * cell.data]
    dtype, attention = TARGETS[cell.target].dtype, attention_of(cell, own)
    state = stage_state(cell, own, dtype, attention)
    found: dict[str, Any] = {"dtype": dtype, "attention": attention}
    try:
        programs = compiled_programs(cell, state)
    except Exception as error:  # any refusal of a compiler is a result
        found |= refused(cell, state, own[0], first_line(error))
    else:
        found |= seen(cell, state, programs)
    return found | {"seconds": round(time.perf_counter() - started, 1)}


def refused(cell: Cell, state: StageState, device: Device, said: str) -> dict[str, Any]:
    """Return the record of a cell whose compilation failed with the message `said`.

    A stage need not compile if its static bytes alone, by our own model, exceed the
    device's memory: no plan has it. Then `beyond` has both figures.
    """
    held = _ours(cell, state).static_bytes
    there = int(2**30 * catalogue()[device_name(device)].memory_gib)
    if _OUT_OF_MEMORY in said and held > there:
        return {"failures": [], "beyond": {"held_bytes": held, "memory_bytes": there}}
    return {"failures": [f"does not compile: {said}"]}


def seen(cell: Cell, state: StageState, programs: list[Any]) -> dict[str, Any]:
    """Check the cell's compiled programs against its stage."""
    texts = [program.as_text() for program in programs]
    donated = sum(a.donated for p in programs for a in jax.tree.leaves(p.args_info))
    aliased = sum(len(aliased_parameters(text)) for text in texts)
    arrays = sorted({a for text in texts for a in square_arrays(text, SEQ_LEN)})
    used = sum((collectives(text) for text in texts), start=Counter())
    most = most_collectives(cell, state)
    failures = []
    if aliased < donated:
        failures.append(f"{donated - aliased} of {donated} donated arrays are copied")
    if arrays:
        failures.append(f"S x S: {', '.join(arrays[:3])}")
    if more := beyond(used, most):
        told = ", ".join(f"{times} {name}" for name, times in sorted(more.items()))
        failures.append(f"collectives beyond those expected: {told}")
    permuted = sum(map(permuted_numbers, texts))
    if permuted > most_permuted(cell, state):
        failures.append(f"collectives permute {permuted} numbers")
    multiplied = sum(map(products, texts), start=Counter())
    failures += wrong_types(cell, state, texts, multiplied)
    return {
        "failures": failures,
        "donated": donated,
        "aliased": aliased,
        "square_arrays": arrays,
        "collectives": dict(used),
        "most_collectives": dict(most),
        "permuted_numbers": permuted,
        "hidden_collectives": sum(map(hidden_collectives, texts)),
        "products": dict(multiplied),
        "other_choices": sum(map(kernels.is_other_choice, programs)),
        "memory": memory(cell, state, programs),
    }


def wrong_types(
    cell: Cell, state: StageState, texts: list[str], multiplied: Counter[str]
) -> Iterator[str]:
    """Yield type faults in programs of a 16-bit stage: numbers of the other 16-bit
    type, and passes without any product in the stage's own type."""
    own = _SIXTEEN_BITS.get(state.programs.dtype.name)
    for other in _SIXTEEN_BITS.values():
        if own not in (None, other) and any(has_type(text, other) for text in texts):
            yield f"numbers in {other}"
    if own and cell.program in PASSES and own not in multiplied:
        yield f"no product of {own}"


def memory(cell: Cell, state: StageState, programs: list[Any]) -> dict[str, int]:
    """Return the compiler's bytes for the largest program, and ours for the stage.

    `predicted_workspace_bytes` is the stage's: of the larger of F and B, of FB, or of
    F, I and W. Compare it with `pass_temp_bytes`: that of the passes compiled here.
    """
    ours = _ours(cell, state)
    largest = max(programs, key=temp_bytes)
    analysis = largest.memory_analysis()
    return {
        "predicted_static_bytes": ours.static_bytes,
        "predicted_saved_bytes": ours.saved_bytes,
        "predicted_half_saved_bytes": ours.half_saved_bytes,
        "predicted_input_bytes": ours.input_bytes,
        "predicted_output_bytes": ours.output_bytes,
        "predicted_workspace_bytes": ours.workspace_bytes,
        "pass_temp_bytes": max(map(temp_bytes, _passes(cell, state)), default=0),
        "temp_bytes": analysis.temp_size_in_bytes,
        "argument_bytes": analysis.argument_size_in_bytes,
        "argument_shape_bytes": argument_bytes(largest),
        "output_bytes": analysis.output_size_in_bytes,
        "alias_bytes": analysis.alias_size_in_bytes,
    }


def _ours(cell: Cell, state: StageState) -> StageMemory:
    """Return the memory of the cell's stage by our model."""
    form = state.programs.function.attention
    assert form is not None, "every stage of the gate says its form"
    model, plan, key = model_and_plan(cell, form)
    return stage_memory(
        plan,
        model,
        key,
        dtype=TARGETS[cell.target].dtype,
        optimizer=OPTIMIZER.init,
        split=cell.program in ("input gradient", "weight gradient"),
        compiler=compiler_of(cell.target),
    )


def _passes(cell: Cell, state: StageState) -> list[Any]:
    """Return the passes that decide the stage's workspace, if all are compiled."""
    programs = state.programs
    match cell.program:
        case "backward":
            return [programs.forward, programs.backward]
        case "fused":
            return [programs.fused]
        case "weight gradient":
            halves = programs.input_gradient, programs.weight_gradient
            return [programs.forward, *halves]
    return []


def temp_bytes(program: Any) -> int:
    return program.memory_analysis().temp_size_in_bytes


def argument_bytes(program: Any) -> int:
    """Return the bytes per device of the arguments that are read, without padding."""
    given, tree = jax.tree.flatten(program.args_info)
    layouts = tree.flatten_up_to(program.input_shardings)
    return device_bytes(
        [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
            for a, sharding in zip(given, layouts, strict=True)
            if sharding is not None
        ]
    )


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:240]}"


@cache
def versions(target: str) -> dict[str, str | None]:
    """Return the versions of JAX and the target's compiler, and our commit."""
    compiler = installed(TARGETS[target])
    return {"jax": jax.__version__, "compiler": compiler, "commit": commit()}


@cache
def commit() -> str:
    """Return the package's last commit, with a + if its files differ from it."""
    package = Path(hetjax.__file__).parent

    def git(*words: str) -> str:
        command = ("git", *words, "--", str(package))
        done = subprocess.run(
            command, cwd=package, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    return git("log", "-1", "--format=%H")[:10] + "+" * bool(git("status", "--short"))
