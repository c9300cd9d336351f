# SPDX-License-Identifier: Apache-2.0
"""What each remat choice keeps of a block, compared with JAX's plain derivative.

Legend: B sequences, L positions, D residual width.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Jaxpr, jaxprs_in_params

from hetjax.models.model import Params, apply, init_params
from hetjax.plans.plan import Remat
from hetjax.stage.remat import POLICIES, with_remat
from tests.costs.small_models import SEQ_LEN, WIDTH, family

COSTLY = ("dot_general", "sort", "top_k", "cumsum", "gather", "scatter-add")
X_BLD = jax.ShapeDtypeStruct((2, SEQ_LEN, WIDTH), jnp.float32)


def block_of(name: str) -> tuple[Any, list[Params]]:
    """Return the first block of a family as a function, and its parameters."""
    modules = family(name).layers[1].modules

    def block(params: list[Params], x_BLD: jax.Array) -> jax.Array:
        for spec, own in zip(modules, params, strict=True):
            x_BLD, _ = apply(spec, own, x_BLD)
        return x_BLD

    return block, [init_params(spec, jax.random.key(0)) for spec in modules]


def primitives(jaxpr: Jaxpr) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in jaxprs_in_params(eqn.params):
            yield from primitives(inner)


def both_passes(block: Any, params: list[Params]) -> Counter[str]:
    """Count the costly operations of the block's forward and backward."""

    def passes(params: list[Params], x_BLD: jax.Array, dy_BLD: jax.Array) -> Any:
        return jax.vjp(block, params, x_BLD)[1](dy_BLD)

    found = Counter(primitives(jax.make_jaxpr(passes)(params, X_BLD, X_BLD).jaxpr))
    return Counter({name: found[name] for name in COSTLY})


def kept_bytes(block: Any, params: list[Params]) -> int:
    kept = jax.eval_shape(lambda p, x: jax.vjp(block, p, x)[1], params, X_BLD)
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(kept))


@pytest.mark.parametrize("name", ["gpt", "llama", "moe"])
def test_without_remat_nothing_costly_is_done_again(name: str):
    block, params = block_of(name)
    lean = jax.checkpoint(block, policy=POLICIES["none"])
    assert both_passes(lean, params) == both_passes(block, params)


@pytest.mark.parametrize("name", ["gpt", "llama", "moe"])
def test_each_remat_choice_keeps_less(name: str):
    block, params = block_of(name)
    none, selective, full = (
        kept_bytes(jax.checkpoint(block, policy=POLICIES[remat]), params)
        for remat in ("none", "selective", "full")
    )
    assert full < selective < none < kept_bytes(block, params)


def test_compiled_backwards_make_again_what_gradients_need_and_no_more():
    """The repeated products, of a block's eight, by remat choice.

    "none" repeats attention's scores, which no choice keeps. "selective" repeats the
    same, as attention's output is kept. "full" repeats all but the last product.
    """
    block, params = block_of("gpt")

    def num_products(remat: Remat) -> int:
        lean = with_remat(block, remat, looped=False)
        kept = jax.eval_shape(lambda p, x: jax.vjp(lean, p, x)[1], params, X_BLD)
        backward = jax.jit(lambda vjp, dy_BLD: vjp(dy_BLD)).lower(kept, X_BLD)
        return len(re.findall(r"= \S+ dot\(", backward.compile().as_text() or ""))

    assert num_products("none") == 16 + 1
    assert num_products("selective") == 16 + 1
    assert num_products("full") == 16 + 7
