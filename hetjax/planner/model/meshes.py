# SPDX-License-Identifier: Apache-2.0
"""Options that differ in nothing but what they keep, merged into one mesh.

Owns the choice among them: where so many microbatches are in flight, the fastest that
holds them all. Does not own what options cost (`problem.py`).

Letters of array names: M meshes, F microbatches held, from 1; others as in
`problem.py`.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Meshes:
    """`busy_s_BMFU`: seconds of the fastest option of a mesh that holds F microbatches,
    inf if there is none, and `option_BMFU` that option. `first_M`: some option of each.

    There is only F = 1 where options hold either nothing or all that is asked for.
    """

    first_M: NDArray[np.int64]
    busy_s_BMFU: NDArray[np.float64]
    option_BMFU: NDArray[np.int64]


def merged(
    alike_O: Sequence[Hashable],
    busy_s_BOU: NDArray[np.float64],
    most_in_flight_BOU: NDArray[np.int64],
    most_held: int,
) -> Meshes:
    """Merge the options that are alike; none holds more than `most_held`."""
    keys = list(dict.fromkeys(alike_O))
    of_O = np.array([keys.index(key) for key in alike_O])
    held_F = np.arange(1, most_held + 1)
    busy_s_BOFU = np.where(
        most_in_flight_BOU[:, :, None] >= held_F[:, None],
        np.nan_to_num(busy_s_BOU, nan=np.inf)[:, :, None],
        np.inf,
    )
    busy, option = [], []
    for m in range(len(keys)):
        members = np.flatnonzero(of_O == m)
        best_BFU = busy_s_BOFU[:, members].argmin(axis=1)
        option.append(members[best_BFU])
        busy.append(busy_s_BOFU[:, members].min(axis=1))
    return Meshes(
        first_M=np.array([alike_O.index(key) for key in keys]),
        busy_s_BMFU=np.stack(busy, axis=1),
        option_BMFU=np.stack(option, axis=1),
    )
