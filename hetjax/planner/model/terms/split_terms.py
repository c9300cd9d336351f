# SPDX-License-Identifier: Apache-2.0
"""A problem to bound plans by whose backward passes may be split in two halves.

Owns the costs of that problem, and why its prefix form holds for split backward passes,
too. Does not own the problem of whole ones, whose costs it changes (`terms.py`), nor
how bounds are proved (`bound/`).

Derivation (ours). Let f_s be the seconds of a forward of stage s, t_s those of a
microbatch, in whichever way it takes fewer, and c_s a message, one way. Let R_s be the
time from the first forward of stage s to the end of all that it and the stages behind
it do. Stage s does m microbatches, so that R_s >= m t_s, and stage s + 1 begins no
earlier than a forward and a message after it: R_s >= f_s + c_s + R_(s+1). The last
activation arrives m l_s after the first forward or later, and its gradient takes l_s
back: R_s >= f_s + (m + 1) l_s. Where the weights' half is left for later, nothing more
of a backward has to be done before the stage in front can go on.

With an integer K such that K f_s >= t_s this follows from the recurrence of whole
backward passes for times t_s / K, hops c_s / 2, links l_s / K and m K microbatches:

    m t_s = (m K) (t_s / K),  f_s + c_s >= t_s / K + 2 (c_s / 2),
    f_s + (m + 1) l_s >= t_s / K + (m K + 1) (l_s / K).

A layer of little forward, such as an embedding, may have K f < t. What all such layers
lack together, at most, is taken off the bound: no sum of f_s lacks more.
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
    K: its microbatches are such parts of real ones, and its batch K times larger.
    """
    forward_s_BOK, split_s_BOK, kinds = forward_and_split_s_BOK(request, degrees)
    parts = _parts(forward_s_BOK, split_s_BOK)
    lacking_s_BOK = np.nan_to_num(split_s_BOK / parts - forward_s_BOK)
    lacking_s_K = lacking_s_BOK.max(axis=(0, 1), initial=0.0)
    p = bound_problem(request, degrees, busy_s_BOK=split_s_BOK, parts=parts)
    return p, float(lacking_s_K[list(kinds)].sum()), parts


def _parts(forward_s_BOK: Floats, split_s_BOK: Floats) -> int:
    """K: as large as the layers ask for that take most of the time."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_BOK = split_s_BOK / forward_s_BOK
    weight_K = np.nan_to_num(split_s_BOK).max(axis=(0, 1))
    largest = int(weight_K.argmax())
    asked = float(np.nanmax(ratio_BOK[:, :, largest]))
    return int(np.clip(np.ceil(asked * (1 - 1e-9)), 1, _MOST_PARTS))
