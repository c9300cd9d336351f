# SPDX-License-Identifier: Apache-2.0
"""Whether a step gives the same bits again, and what other attention would give.

A run that resumes is promised the bits of one that was never broken off, and cuDNN says
of its attention that gradients may differ from run to run. Owns the comparison, within
a process; `digest` is to be compared between processes, each of which tunes its kernels
anew. Does not own the stage (`one_stage.py`).
"""

import argparse
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax

from experiments.gpu.one_stage import node_of, one_stage, other_forms
from experiments.gpu.options import config_of
from hetjax.plans.attention import Attention
from hetjax.plans.precision import Dtype

# Of the norm of a parameter's gradient: what two forms may be apart from fp32
BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
_MOST_POSITIONS, _NUM_BLOCKS = 2_048, 2  # enough for every kernel of the whole model
_TIMES = 3
_GRADIENT = "opt."  # optax.trace without decay keeps the gradient as its state

State = Mapping[str, np.ndarray]


def repeats(arguments: argparse.Namespace, device: jax.Device) -> dict[str, Any]:
    """The same step from the same state, several times."""
    asked: tuple[Dtype, Attention] = arguments.dtype, arguments.attention
    of, first, differ = _again(arguments, device, *asked)
    with jax.default_matmul_precision("highest"):
        _, exact, _ = _again(arguments, device, "float32", "chunked", times=1)
    errors = {str(of.stage.attention): _apart(first, exact)}
    for form in other_forms(of.stage.attention):
        _, found, _ = _again(arguments, device, of.precision, form, times=1)
        errors[form] = _apart(found, exact)
    bound = BOUNDS[of.precision]
    return {
        "model": of.model.name,
        "precision": of.precision,
        "attention": of.stage.attention,
        "times": _TIMES,
        "bit_equal": not differ,
        "differ": differ,
        "digest": _digest(first),
        "gradient_error_by_attention": errors,
        "bound": bound,
        "within_bound": max(errors.values()) <= bound,
    }


def _again(
    arguments: argparse.Namespace,
    device: jax.Device,
    dtype: Dtype,
    attention: Attention,
    times: int = _TIMES,
) -> tuple[Any, State, list[str]]:
    """The stage, its state after a step, and what of that was other another time."""
    config = config_of(arguments)
    config = replace(
        config,
        num_blocks=min(config.num_blocks, _NUM_BLOCKS),
        max_seq_len=min(config.max_seq_len, _MOST_POSITIONS),
    )
    of = one_stage(
        config,
        node_of(device),
        microbatches=2,
        size=arguments.microbatch_size,
        remat=arguments.remat,
        dtype=dtype,
        attention=attention,
    )
    runtime = of.runtime(device, optax.trace(decay=0.0))

    def after_step() -> State:
        runtime.initialise(0)
        commit = runtime.step(0, of.batch(), loss_scale=of.loss_scale)
        assert not commit.is_skipped, commit
        return {entry.name: value for entry, value in runtime.entries()}

    first, differ = after_step(), dict[str, None]()
    for _ in range(times - 1):
        found = after_step()
        differ |= {n: None for n in first if _bits(first[n]) != _bits(found[n])}
    runtime.close()
    return of, first, list(differ)


def _apart(found: State, exact: State) -> float:
    """The largest relative error of a parameter's gradient."""
    errors = [
        float(np.linalg.norm(found[name] - value) / np.linalg.norm(value))
        for name, value in exact.items()
        if name.startswith(_GRADIENT) and np.any(value)
    ]
    return max(errors)


def _digest(state: State) -> str:
    """Of all gradients and new weights."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + _bits(state[name]))
    return digest.hexdigest()


def _bits(value: np.ndarray) -> bytes:
    return np.ascontiguousarray(value).tobytes()
