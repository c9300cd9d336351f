# SPDX-License-Identifier: Apache-2.0
"""The unit of persistent state: one array of one module, whatever the plan.

Owns the names and the fixed slices under which checkpoints keep state. Does not own
how stages hold it (`hetjax/runtime/state.py`).
"""

from dataclasses import dataclass

import numpy as np

WEIGHTS = "params."  # how names of entries begin that are weights


@dataclass(frozen=True, slots=True)
class Entry:
    """One array of the state of one module.

    `name` is `params.<path>` or `opt.<optimizer path>.<path>`, for instance
    `opt.0.mu.block_003.attention.q`; `slices` is its (dim, number) of fixed equal
    slices, the same for every plan.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    slices: tuple[int, int]
