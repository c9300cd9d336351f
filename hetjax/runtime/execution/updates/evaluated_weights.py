# SPDX-License-Identifier: Apache-2.0
"""Computes the weights at which a checkpoint's model is evaluated, one at a time.

For rules that train at other weights: the evaluated ones follow from a parameter and
its state, however a plan had cut them. Does not own the formula (`hetjax/optimizers/`),
nor the same computation for a stage (`update.py`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.checkpoint.format import Entry
from hetjax.models.model import Model, ModuleSpec
from hetjax.optimizers.evaluation import evaluates_elsewhere, evaluation_weights
from hetjax.runtime.execution.state import stage_entries
from hetjax.stage import arrays, eight_bits
from hetjax.stage.partition import StageParameters, parameter_alone

EvaluatedWeight = Callable[[str], np.ndarray]  # fp32 value by the full path


def evaluated_weights(
    model: Model, init: arrays.OptimizerInit, read: Callable[[Entry], np.ndarray]
) -> EvaluatedWeight | None:
    """Return a function that gives each trained parameter as it is to be evaluated.

    None if that is the saved one. `init` makes the state of the rule, `read` reads
    entries.
    """
    if not evaluates_elsewhere(jax.eval_shape(init, {"any": jnp.zeros(1)})):
        return None
    modules = {module.path: module for module in model.modules}

    def evaluated(path: str) -> np.ndarray:
        name = max((name for name in modules if path.startswith(f"{name}.")), key=len)
        parameter = path.removeprefix(f"{name}.")
        return _evaluated(modules[name], parameter, init, read)

    return evaluated


def _evaluated(
    module: ModuleSpec,
    parameter: str,
    init: arrays.OptimizerInit,
    read: Callable[[Entry], np.ndarray],
) -> np.ndarray:
    held = parameter_alone(module, parameter)
    weights, state = _abstract(held, init)
    values = [read(found[0]) for _, found, _ in stage_entries(held, weights, state)]
    pairs = jax.tree.structure(list(zip(weights, state, strict=True)))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        [(own, by_module)] = jax.tree.unflatten(pairs, values)
        (of_module,) = by_module.values()
        (value,) = evaluation_weights(eight_bits.seen(of_module), own).values()
        return np.asarray(value)


def _abstract(held: StageParameters, init: arrays.OptimizerInit) -> tuple[Any, Any]:
    """Return (masters, optimizer state) of a stage that holds only this."""
    stacks = held.kind.stacks
    masters = tuple(
        {
            leaf: jax.ShapeDtypeStruct(param.shape, jnp.float32)
            for leaf, param in stack.leaves().items()
        }
        for stack in stacks
    )
    state = jax.eval_shape(
        lambda own: arrays.fresh_optimizer_state(stacks, own, init), masters
    )
    return masters, state
