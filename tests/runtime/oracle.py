# SPDX-License-Identifier: Apache-2.0
"""The oracle: the same model in one `jax.jit` on one device.

It uses no part of the runtime, and its attention computes all scores at once.
"""

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax.data.batches import Batch
from hetjax.mesh.multihost import value_here, whole_value
from hetjax.models.attention.attention import in_form
from hetjax.models.model import Model, abstract_params, apply, init_params
from hetjax.plans.plan import Plan
from hetjax.runtime.execution.stages import Stages
from hetjax.runtime.execution.state import stage_entries


def oracle_params(model: Model, seed: int) -> dict[str, jax.Array]:
    """Return fresh fp32 parameters by full path."""
    params: dict[str, jax.Array] = {}
    for number, spec in enumerate(model.modules):
        key = jax.random.fold_in(jax.random.key(seed), number)
        for name, value in init_params(spec, key).items():
            params[f"{spec.path}.{name}"] = value
    return params


def oracle_loss_sums(
    model: Model, params: dict[str, Any], inputs_GL: Any, targets_GL: Any
) -> tuple[jax.Array, jax.Array]:
    """Return (cross-entropy + auxiliary loss, cross-entropy), summed over tokens."""
    x, aux = inputs_GL, jnp.zeros((), jnp.float32)
    for spec in model.modules:
        own = {
            path.removeprefix(spec.path + "."): value
            for path, value in params.items()
            if path.startswith(spec.path + ".")
        }
        tied = {name: params[owner] for name, owner in spec.tied}
        last = spec is model.modules[-1]
        given = (x, targets_GL) if last else (x,)
        x, module_aux = apply(in_form(spec, "xla"), own | tied, *given)
        aux += module_aux
    return x + aux, x


def oracle_gradients(
    model: Model, params: dict[str, Any], batch: Batch
) -> tuple[float, dict[str, np.ndarray]]:
    """Return (mean cross-entropy, gradients of the mean loss by path) from one jit."""
    (_, ce), grads = _oracle_step(model, batch[0].shape)(params, *batch)
    return float(ce), {path: np.asarray(grad) for path, grad in grads.items()}


@lru_cache(maxsize=4)
def _oracle_step(model: Model, batch_shape: tuple[int, ...]) -> Any:
    def loss(params: Any, inputs_GL: Any, targets_GL: Any) -> Any:
        total, ce = oracle_loss_sums(model, params, inputs_GL, targets_GL)
        return total / targets_GL.size, ce / targets_GL.size

    params = {
        f"{spec.path}.{name}": jax.ShapeDtypeStruct(param.shape, jnp.float32)
        for spec in model.modules
        for name, param in abstract_params(spec).items()
    }
    tokens_GL = jax.ShapeDtypeStruct(batch_shape, jnp.int32)
    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return step.lower(params, tokens_GL, tokens_GL).compile()


def random_batch(plan: Plan, vocab_size: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    shape = (plan.global_batch, plan.seq_len)
    inputs, targets = (rng.integers(0, vocab_size, shape) for _ in range(2))
    return inputs.astype(np.int32), targets.astype(np.int32)


def keep_gradients() -> optax.GradientTransformation:
    """Return an optimizer that changes nothing and keeps the gradient as its state."""

    def init(params: Any) -> Any:
        return {"gradient": jax.tree.map(jnp.zeros_like, params)}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(jnp.zeros_like, updates), {"gradient": updates}

    return optax.GradientTransformation(init, update)


def kept_gradients(runtime: Stages) -> dict[str, list[np.ndarray]]:
    """Return the gradients that all holders of a parameter kept, by path.

    Tied parameters count for each holder. A stage that spans processes gives one copy;
    its replicated parameters give one copy per process.
    """
    prefix, found = "opt.gradient.", {}
    for key, state in runtime.stages.items():
        held = runtime.partition.stages[key], state.masters, state.opt_state
        for named, entries, leaf in stage_entries(*held):
            value = whole_value(leaf)
            if value is None and leaf.is_fully_replicated:
                value = value_here(leaf)
            if value is None:
                continue
            values = value if named.stack.stacked else value[None]
            for entry, value in zip(entries, values, strict=True):
                if entry.name.startswith(prefix):
                    path = entry.name.removeprefix(prefix)
                    found.setdefault(path, []).append(value)
    return found


def assert_gradients_equal(
    found: dict[str, list[np.ndarray]], expected: dict[str, Any]
) -> None:
    """Assert gradients within 1e-5 of the oracle's, and bit-equal on all holders."""
    assert found.keys() == expected.keys()
    for path, holders in found.items():
        # Softmax ignores a shift of all scores, so the gradient of a key bias is
        # rounding.
        scale = np.linalg.norm(expected[path.replace("k_bias", "q_bias")])
        assert np.linalg.norm(holders[0] - expected[path]) <= 1e-5 * scale, path
        for other in holders[1:]:
            np.testing.assert_array_equal(other, holders[0], err_msg=path)
