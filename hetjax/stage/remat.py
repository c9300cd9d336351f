# SPDX-License-Identifier: Apache-2.0
"""What of a run's units is kept for their backward, and what is made again.

Does not own what units compute (`function.py`).

With remat "full" a block is made again but for its last product and that one's
all-reduce, which no gradient needs: it costs less than in Megatron-LM, which runs the
whole forward again (1.15 of "selective" on its 22B and 175B, not the published 1.3;
tested).
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from hetjax.models.attention.chunked_attention import KEPT
from hetjax.plans.plan import Remat

# One pass over memory each, which a compiler fuses into what reads them next; of tanh,
# JAX 0.12 has one_minus_square; reshard it puts under a mesh, of constants alone.
_ELEMENTWISE = frozenset(
    """
    abs add add_any and broadcast_in_dim clamp convert_element_type cos div eq erf
    exp expm1 ge gt integer_pow iota le log log1p logistic lt max min mul ne neg not
    one_minus_square or pow reshape reshard rsqrt select_n sign sin sqrt square
    squeeze stop_gradient sub tanh transpose
    """.split()
)


def _costs_more_than_memory(primitive: Any, *_: Any, **__: Any) -> bool:
    """Keep products, reductions, gathers and sorts; make the rest again.

    To make an elementwise result again takes no more traffic than to read it back.
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
    """Return the unit of a run, keeping for its backward what the choice allows.

    `looped` if it is the body of a scan, out of which no compiler merges what is made
    again with what was made first.
    """
    return jax.checkpoint(unit, policy=POLICIES[remat], prevent_cse=not looped)
