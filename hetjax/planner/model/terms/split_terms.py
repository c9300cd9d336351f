# SPDX-License-Identifier: Apache-2.0
"""Builds the bound problem of plans whose backward passes may be split in two halves.

Owns the costs of that problem, and the proof that its prefix form holds for split
backward passes, too. Does not own the problem of whole backward passes, whose costs it
changes (`terms.py`), nor how bounds are proved (`bound/`).

Derivation (ours). Let f_s be the seconds of a forward of stage s. Let t_s be the lesser
of a microbatch's seconds with a whole and with a split backward pass, and c_s those of
a message, one way. Let R_s be the time from the first forward of stage s to the end of
all work of stage s and the stages behind it. Stage s computes m microbatches, so
R_s >= m t_s. Stage s + 1 starts no earlier than a forward and a message after stage s:
R_s >= f_s + c_s + R_(s+1). Link s is held for l_s per message. The last activation
arrives no earlier than m l_s after the first forward, and its gradient takes l_s back:
R_s >= f_s + (m + 1) l_s. There are no terms for backward passes after these times,
since the stage in front need not wait for the weights' half.

With an integer K such that K f_s >= t_s, these inequalities follow from the recurrence
of whole backward passes for times t_s / K, hops c_s / 2, links l_s / K and m K
microbatches:

    m t_s = (m K) (t_s / K),  f_s + c_s >= t_s / K + 2 (c_s / 2),
    f_s + (m + 1) l_s >= t_s / K + (m K + 1) (l_s / K).

A layer with a short forward, such as an embedding, may have K f < t. The most that all
such layers lack together is subtracted from the bound: no sum of f_s lacks more.
"""

from collections.abc import Sequence

import numpy as np

from hetjax.planner.model.problem import Floats, Problem
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.terms.terms import bound_problem, forward_and_split_s_BOK

_MOST_PARTS = 8  # K: more parts make pricing slower


def split_bound_problem(
    request: PlanRequest, degrees: Sequence[int]
) -> tuple[Problem, float, int]:
    """Return the problem, the seconds by which plans may be faster than its bound, and
    K. Each of its microbatches is 1 / K of a real one, and its batch is K times larger.
    """
    forward_s_BOK, split_s_BOK, kinds = forward_and_split_s_BOK(request, degrees)
    parts = _parts(forward_s_BOK, split_s_BOK)
    lacking_s_BOK = np.nan_to_num(split_s_BOK / parts - forward_s_BOK)
    lacking_s_K = lacking_s_BOK.max(axis=(0, 1), initial=0.0)
    p = bound_problem(request, degrees, busy_s_BOK=split_s_BOK, parts=parts)
    return p, float(lacking_s_K[list(kinds)].sum()), parts


def _parts(forward_s_BOK: Floats, split_s_BOK: Floats) -> int:
    """Return K: as large as the kind of layer with the longest time needs."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_BOK = split_s_BOK / forward_s_BOK
    weight_K = np.nan_to_num(split_s_BOK).max(axis=(0, 1))
    largest = int(weight_K.argmax())
    asked = float(np.nanmax(ratio_BOK[:, :, largest]))
    return int(np.clip(np.ceil(asked * (1 - 1e-9)), 1, _MOST_PARTS))
