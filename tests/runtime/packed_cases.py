# SPDX-License-Identifier: Apache-2.0
"""Packed sequences for random plans, and an oracle that sees documents one by one.

The oracle uses no code of hetjax that knows documents. Its attention gets one document
after the other, its experts get whole sequences without padding.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.data.batches import Batch
from hetjax.models.attention.attention import AttentionConfig, in_form
from hetjax.models.experts.moe import MoeConfig
from hetjax.models.layers import EmbeddingConfig
from hetjax.models.model import Model, apply, bind
from tests.runtime.random_plans import Case, random_case


def packed_case(seed: int, nodes: Sequence[str] = ("even", "odd")) -> Case:
    """Return a random case whose experts drop no token."""
    case = random_case(seed, nodes)

    def roomy(config: Any) -> Any:
        if not isinstance(config, MoeConfig):
            return config
        routing = replace(config.routing, capacity_factor=4.0, balance_coefficient=0.1)
        return replace(config, routing=routing)

    layers = tuple(
        replace(
            layer,
            modules=tuple(
                replace(spec, config=roomy(spec.config)) for spec in layer.modules
            ),
        )
        for layer in case.model.layers
    )
    model = replace(case.model, layers=layers)
    return replace(case, model=model, plan=replace(case.plan, packed=True))


def packed_batch(case: Case, seed: int) -> Batch:
    """Return sequences of one to three documents, most with padding at the end.

    In each document, some targets count.
    """
    rng = np.random.default_rng(seed)
    shape = (case.plan.global_batch, case.plan.seq_len)
    inputs, targets = (rng.integers(0, case.model.vocab_size, shape) for _ in range(2))
    documents = np.zeros(shape, int)
    for row in documents:
        at = 0
        for number in range(1, rng.integers(2, 5)):
            length = rng.integers(1, 4)
            row[at : at + length] = number
            at += length
    counts = (documents > 0) & (rng.random(shape) < 0.7)
    counts[0, 0] = True
    made = np.where(documents, inputs, 0), np.where(counts, targets, -1), documents
    return tuple(array.astype(np.int32) for array in made)


def spans(documents_L: np.ndarray) -> list[slice]:
    """Return the position range of each document of a sequence."""
    numbers = [n for n in dict.fromkeys(documents_L.tolist()) if n]
    places = [np.flatnonzero(documents_L == n) for n in numbers]
    return [slice(int(at[0]), int(at[-1]) + 1) for at in places]


def expected(
    model: Model, params: dict[str, Any], batch: Batch
) -> tuple[float, dict[str, np.ndarray]]:
    inputs_GL, targets_GL, documents_GL = batch
    num_counted, num_tokens = (
        float(np.sum(array)) for array in (targets_GL >= 0, documents_GL > 0)
    )

    def row_loss(params: dict[str, Any], row: int) -> tuple[jax.Array, jax.Array]:
        parts = spans(documents_GL[row])
        x: Any = jnp.asarray(inputs_GL[row : row + 1, : parts[-1].stop])
        aux = jnp.zeros(())
        for spec in model.modules:
            own = {
                path.removeprefix(spec.path + "."): value
                for path, value in params.items()
                if path.startswith(spec.path + ".")
            }
            own |= {name: params[owner] for name, owner in spec.tied}
            if spec is model.modules[-1]:
                head: Any = bind(spec, own)
                x = head.logits(x)
            elif isinstance(spec.config, (AttentionConfig, EmbeddingConfig)):
                alone = in_form(spec, "xla")
                x = jnp.concatenate(
                    [apply(alone, own, x[:, at])[0] for at in parts], axis=1
                )
            else:
                x, module_aux = apply(spec, own, x)
                aux += module_aux
        (columns,) = np.nonzero(targets_GL[row] >= 0)
        log_p_NV = jax.nn.log_softmax(x[0, columns])
        return -jnp.sum(
            log_p_NV[np.arange(len(columns)), targets_GL[row, columns]]
        ), aux

    def loss(params: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        pairs = [row_loss(params, row) for row in range(len(inputs_GL))]
        ce, aux = (
            sum(found, start=jnp.zeros(())) for found in zip(*pairs, strict=True)
        )
        return ce / num_counted + aux / num_tokens, ce / num_counted

    (_, ce), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return float(ce), jax.tree.map(np.asarray, gradients)
