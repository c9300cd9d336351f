# SPDX-License-Identifier: Apache-2.0
"""Tests whether an update and a step repeat to the bit, and how exact attention is.

Replicas on equal cards are compared to the bit, which needs updates with the same bits
in every process. A resumed run promises the bits of a run that never stopped, which
needs the same of a whole step. Attention by cuDNN does not repeat to the bit, so this
part also takes steps by programs without nondeterministic operations. Owns the
comparison of states and the cost of such programs. Does not own the stage
(`one_stage.py`) nor the repeated steps and updates (`repeated.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median

import jax
import optax

from experiments.gpu.models.one_stage import OneStage, node_of, other_forms
from experiments.gpu.models.repeated import (
    GRADIENT,
    State,
    begin,
    described,
    largest_error,
    stepped,
    unlike_names,
    updated,
)
from experiments.gpu.models.way import Task, Way
from experiments.gpu.processes.compiling import TO_THE_SAME_BITS, with_flag
from experiments.gpu.rows import Row
from experiments.gpu.setting import Setting
from hetjax.cluster.catalogue import Precision
from hetjax.cluster.memory_budget import node_plan_bytes
from hetjax.costs.measured.compiled import NOTHING
from hetjax.plans.precision import node_precision

# bound on the error that rounding may cause, relative to the float32 gradient's norm
BOUNDS: Mapping[Precision, float] = {
    "float32": 1e-4,
    "bfloat16": 5e-2,
    "float16": 1e-2,
}
COST = "step, deterministic over default"
_TIMES = 3
_COMPILING_S = 6.0  # the time left that another form of attention needs
_COSTING_S = 35.0  # the time left that timing steps needs
_ROUNDS, _STEPS = 4, 3
_AT_ONCE = "both processes compile at the same time"


def measure(setting: Setting) -> Iterator[Row]:
    """Compare repeated updates and steps, here and in other processes. Time steps of
    both kinds of programs. Then compare gradients with float32."""
    with _process() as other:
        updates = other.submit(updated, setting)
        steps = other.submit(stepped, setting)
        here = updated(setting, _TIMES)
        first, *again = here.states
        note = f"{described(here.stage)}, AdamW, random gradients"
        yield from _repeated("an update again in one process", first, again, note)
        others, note = updates.result().states, f"{note}; {_AT_ONCE}"
        yield from _repeated("an update in another process", first, others, note)
        here = stepped(setting, times=_TIMES)
        (first, *again), note = here.states, described(here.stage)
        yield from _repeated("a step again in one process", first, again, note)
        others, note = steps.result().states, f"{note}; {_AT_ONCE}"
        yield from _repeated("a step in another process", first, others, note)
    yield from _deterministic(setting)
    if setting.left_s() > _COSTING_S:
        yield from _cost(setting)
    else:
        yield Row(what=COST, measured=None, note="no time was left")
    yield from _errors(setting, here.stage, first)


def _process(environment: Mapping[str, str] | None = None) -> ProcessPoolExecutor:
    """Return a pool of one process that will start JAX with these variables."""
    return ProcessPoolExecutor(
        1,
        mp_context=get_context("spawn"),
        initializer=begin,
        initargs=(environment or {},),
    )


def _deterministic(setting: Setting) -> Iterator[Row]:
    """Repeat the step in two processes whose programs should give the same bits."""
    variables = with_flag(TO_THE_SAME_BITS)
    with _process(variables) as one, _process(variables) as other:
        steps = one.submit(stepped, setting, times=_TIMES)
        others = other.submit(stepped, setting)
        here = steps.result()
        first, *again = here.states
        note = f"{described(here.stage)}; {TO_THE_SAME_BITS}; {_AT_ONCE}"
        what = "a step again in one process, deterministic"
        yield from _repeated(what, first, again, note)
        what = "a step in another process, deterministic"
        yield from _repeated(what, first, others.result().states, note)


def _repeated(
    what: str, first: State, others: Sequence[State], note: str
) -> Iterator[Row]:
    """Yield whether all states have the first one's bits, and their distance."""
    unlike = sorted({n for other in others for n in unlike_names(first, other)})
    if unlike:
        note = f"{note}; {len(unlike)} of {len(first)} arrays differ: {unlike[0]}, ..."
    yield Row(what=f"{what}: equal to the bit", measured=not unlike, note=note)
    distance = max(largest_error(other, first) for other in others)
    yield Row(what=f"{what}: largest relative distance", measured=distance)


def _cost(setting: Setting) -> Iterator[Row]:
    """Time steps of a whole model by both kinds of programs, in turns."""
    task = _task_of_two(setting)
    if task is None:
        yield Row(what=COST, measured=None, note="the card has no memory for two")
        return
    kinds = {"default": {}, "deterministic": with_flag(TO_THE_SAME_BITS)}
    ways = {kind: Way("product", task, own) for kind, own in kinds.items()}
    times_s = {kind: list[float]() for kind in kinds}
    for way in ways.values():
        way.ready()
    for _ in range(setting.choose(_ROUNDS, 1)):
        for kind, way in ways.items():
            times_s[kind] += way.steps_s(setting.choose(_STEPS, 1))
    for way in ways.values():
        way.end()
    sizes = f"{task.model}, {task.microbatches} x {task.size} x {task.seq_len}"
    note = f"{sizes}, {task.precision}, remat {task.remat}; in turns"
    for kind, own_s in times_s.items():
        yield Row(what=f"step, {kind}", measured=median(own_s), unit="s", note=note)
    ratio = median(times_s["deterministic"]) / median(times_s["default"])
    yield Row(what=COST, measured=ratio, unit="times", note=TO_THE_SAME_BITS)


def _task_of_two(setting: Setting) -> Task | None:
    """Return a task that fits on the card twice: the larger model if possible. None if
    none fits."""
    node = node_of(setting.device)
    for model in setting.choose(("llama-1b", "gpt2-124m"), ("tiny",)):
        task = Task(
            model=model,
            seq_len=setting.choose(1_024 if model == "gpt2-124m" else 2_048, 32),
            microbatches=setting.choose(8, 2),
            size=setting.choose(2, 1),
            remat="selective",
            precision=node_precision(node),
            platform=setting.platform,
        )
        used = task.stage(node).memory(optax.adamw(1e-4), NOTHING)
        if 2 * used.total_bytes <= node_plan_bytes(node):
            return task
    return None


def _errors(setting: Setting, stage: OneStage, native: State) -> Iterator[Row]:
    """Yield the error of each form's gradients against exact ones in float32."""
    if setting.left_s() < 2 * _COMPILING_S:
        return
    with jax.default_matmul_precision("highest"):
        (exact,) = stepped(setting, "float32", "chunked").states
    exact = {name: v for name, v in exact.items() if name.startswith(GRADIENT)}
    bound, form = BOUNDS[stage.precision], stage.stage.attention
    errors = [largest_error(native, exact)]
    yield _error(str(form), errors[0], stage.precision)
    for other in other_forms(form):
        if setting.left_s() < _COMPILING_S:
            return
        (state,) = stepped(setting, stage.precision, other).states
        errors.append(largest_error(state, exact))
        yield _error(other, errors[-1], stage.precision)
    yield Row(
        what="gradients of all forms of attention within rounding",
        measured=max(errors) <= bound,
        note=f"at most {bound:g} in {stage.precision}",
    )


def _error(form: str, error: float, precision: str) -> Row:
    return Row(
        what=f"gradient error with attention {form}",
        measured=error,
        unit="of the norm in float32",
        note=f"the parameter with the largest, in {precision}",
    )
