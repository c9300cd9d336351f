# SPDX-License-Identifier: Apache-2.0
"""Whether a step gives the same bits again, and how exact each form of attention is.

A run that resumes is promised the bits of one that was never stopped, and replicas on
equal cards are compared to the bit; but cuDNN says that gradients of its attention may
differ from run to run, and each process tunes its kernels anew. Owns the comparison of
states after one step. Does not own the stage (`one_stage.py`).
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import jax
import numpy as np
import optax

from experiments.gpu.models.one_stage import OneStage, node_of, one_stage, other_forms
from experiments.gpu.rows import Row
from experiments.gpu.setting import Setting
from hetjax.cluster.catalogue import Precision
from hetjax.models.presets import model_config
from hetjax.plans.attention import Attention
from hetjax.plans.precision import Dtype

# of the norm of a parameter's gradient in float32: what rounding may change
BOUNDS: Mapping[Precision, float] = {
    "float32": 1e-4,
    "bfloat16": 5e-2,
    "float16": 1e-2,
}
_NUM_BLOCKS = 2  # these have every kernel of the whole model
_MICROBATCHES = 2
_TIMES = 3
_COMPILING_S = 6.0  # without which no other form of attention is begun
_GRADIENT = "opt."  # optax.trace without decay keeps the gradient as its state

State = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stepped:
    """A stage, and its gradients and weights after each of some first steps."""

    stage: OneStage
    states: tuple[State, ...]


def measure(setting: Setting) -> Iterator[Row]:
    """Compare a step with itself, here and in another process, then with float32."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other_process:
        elsewhere = other_process.submit(_first_state, setting)
        here = _stepped(setting, times=_TIMES)
        first, *again = here.states
        note = _described(here.stage)
        yield from _repeated("a step again in one process", first, again, note)
        note = f"{note}; both processes compile at the same time"
        states = [elsewhere.result()]
        yield from _repeated("a step in another process", first, states, note)
    yield from _errors(setting, here.stage, first)


def _repeated(what: str, first: State, others: list[State], note: str) -> Iterator[Row]:
    """How far the others are from the first state, if they are not the same bits."""
    unlike = sorted({n for other in others for n in unlike_names(first, other)})
    if unlike:
        note = f"{note}; {len(unlike)} of {len(first)} arrays differ: {unlike[0]}, ..."
    yield Row(what=f"{what}: equal to the bit", measured=not unlike, note=note)
    distance = max(largest_error(other, first) for other in others)
    yield Row(what=f"{what}: largest relative distance", measured=distance)


def _errors(setting: Setting, stage: OneStage, native: State) -> Iterator[Row]:
    """Yield the error of each form's gradients against exact ones in float32."""
    with jax.default_matmul_precision("highest"):
        (exact,) = _stepped(setting, "float32", "chunked").states
    exact = {name: v for name, v in exact.items() if name.startswith(_GRADIENT)}
    bound, form = BOUNDS[stage.precision], stage.stage.attention
    errors = [largest_error(native, exact)]
    yield _error(str(form), errors[0], stage.precision)
    for other in other_forms(form):
        if setting.left_s() < _COMPILING_S:
            return
        (state,) = _stepped(setting, stage.precision, other).states
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


def unlike_names(one: State, other: State) -> list[str]:
    """Return the names of arrays that are not the same bits in both."""
    assert one.keys() == other.keys()
    return [n for n, value in one.items() if value.tobytes() != other[n].tobytes()]


def largest_error(found: State, exact: State) -> float:
    """Return the largest relative distance of an array from the exact one."""
    errors = [
        float(np.linalg.norm(found[name] - value) / np.linalg.norm(value))
        for name, value in exact.items()
        if np.any(value)
    ]
    return max(errors)


def _first_state(setting: Setting) -> State:
    """Take the step once; the other process begins here."""
    return _stepped(setting).states[0]


def _stepped(
    setting: Setting,
    dtype: Dtype | None = None,
    attention: Attention = "best",
    times: int = 1,
) -> _Stepped:
    """Take the first step of a stage anew, as often as asked for."""
    device = setting.device
    dtype = dtype or setting.choose("best", "bfloat16")  # a CPU's best is float32
    config = model_config(setting.choose("llama-1b", "tiny"))
    longest = setting.choose(2_048, 32)
    stage = one_stage(
        replace(
            config,
            num_blocks=min(config.num_blocks, _NUM_BLOCKS),
            max_seq_len=min(config.max_seq_len, longest),
        ),
        node_of(device),
        microbatches=_MICROBATCHES,
        size=1,
        dtype=dtype,
        attention=attention,
    )
    runtime, states = stage.runtime(device, optax.trace(decay=0.0)), list[State]()
    for _ in range(times):
        runtime.initialise(0)
        commit = runtime.step(0, stage.batch(), loss_scale=stage.loss_scale)
        assert not commit.is_skipped, commit
        states.append({entry.name: value for entry, value in runtime.entries()})
    runtime.close()
    return _Stepped(stage=stage, states=tuple(states))


def _described(stage: OneStage) -> str:
    return (
        f"{_NUM_BLOCKS} blocks of {stage.model.name}, {stage.plan.seq_len} positions, "
        f"{stage.precision}, attention {stage.stage.attention}"
    )
