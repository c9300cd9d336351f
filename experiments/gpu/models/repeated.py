# SPDX-License-Identifier: Apache-2.0
"""Repeats the same first step, or the same update, of a small stage.

Each repetition leaves its gradients or weights on the host, for comparison to the bit.
Owns the stage and the fresh start of each repetition. Does not own the comparisons
(`parts/bits.py`).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax

from experiments.gpu.models.one_stage import KEY, OneStage, node_of, one_stage
from experiments.gpu.setting import Setting
from hetjax.mesh.axes import replicated
from hetjax.models.presets import model_config
from hetjax.plans.attention import Attention
from hetjax.plans.precision import Dtype
from hetjax.runtime.execution.stage_runtime import StageRuntime

NUM_BLOCKS = 2  # these have every kernel of the whole model
GRADIENT = "opt."  # optax.trace without decay keeps the gradient as its state
_MICROBATCHES = 2
_GRADIENTS = 1e-2  # standard deviation of random gradients

State = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeated:
    """A stage, and its state after each repetition."""

    stage: OneStage
    states: tuple[State, ...]


def begin(variables: Mapping[str, str]) -> None:
    """Set a new process's environment before it starts JAX."""
    os.environ.update(variables)


def stepped(
    setting: Setting,
    dtype: Dtype | None = None,
    attention: Attention = "best",
    times: int = 1,
) -> Repeated:
    """Take the first step of a stage anew, `times` times."""
    stage = _stage(setting, dtype, attention)
    runtime = stage.runtime(setting.device, optax.trace(decay=0.0))
    states = list[State]()
    for _ in range(times):
        runtime.initialise(0)
        commit = runtime.step(0, stage.batch(), loss_scale=stage.loss_scale)
        assert not commit.is_skipped, commit
        states.append(_kept(runtime))
    runtime.close()
    return Repeated(stage=stage, states=tuple(states))


def updated(setting: Setting, times: int = 1) -> Repeated:
    """Update the stage's first weights anew, always by the same gradients."""
    stage = _stage(setting, None, "best")
    runtime = stage.runtime(setting.device, optax.adamw(1e-4))
    states, held = list[State](), runtime.stages[KEY]
    rng = np.random.default_rng(0)
    gradients = jax.tree.map(lambda like: _drawn(rng, like), held.updates.gradients)
    scale = jax.device_put(np.float32(1), replicated(held.programs.mesh))
    for _ in range(times):
        runtime.initialise(0)
        held.masters, held.opt_state, _ = held.updates.update(
            held.masters, held.opt_state, gradients, scale
        )
        weights = _kept(runtime).items()
        states.append({n: v for n, v in weights if not n.startswith(GRADIENT)})
    runtime.close()
    return Repeated(stage=stage, states=tuple(states))


def _drawn(rng: np.random.Generator, like: Any) -> jax.Array:
    values = rng.standard_normal(like.shape, np.float32) * np.float32(_GRADIENTS)
    return jax.device_put(values.astype(like.dtype), like.sharding)


def _kept(runtime: StageRuntime) -> State:
    return {entry.name: value for entry, value in runtime.entries()}


def _stage(setting: Setting, dtype: Dtype | None, attention: Attention) -> OneStage:
    dtype = dtype or setting.choose("best", "bfloat16")  # a CPU's best is float32
    config = model_config(setting.choose("llama-1b", "tiny"))
    longest = setting.choose(2_048, 32)
    return one_stage(
        replace(
            config,
            num_blocks=min(config.num_blocks, NUM_BLOCKS),
            max_seq_len=min(config.max_seq_len, longest),
        ),
        node_of(setting.device),
        microbatches=_MICROBATCHES,
        size=1,
        dtype=dtype,
        attention=attention,
    )


def described(stage: OneStage) -> str:
    """Describe the repeated stage in words."""
    return (
        f"{NUM_BLOCKS} blocks of {stage.model.name}, {stage.plan.seq_len} positions, "
        f"{stage.precision}, attention {stage.stage.attention}"
    )


def unlike_names(one: State, other: State) -> list[str]:
    """Return the names of arrays whose bits differ between the two states."""
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
