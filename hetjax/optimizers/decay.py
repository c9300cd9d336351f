# SPDX-License-Identifier: Apache-2.0
"""Selects the parameters that decay, under every rule."""

from typing import Any

import jax


def matrices(params: Any) -> Any:
    """Mark the parameters that decay: two dims or more and no bias."""

    def is_matrix(path: Any, leaf: Any) -> bool:
        return leaf.ndim >= 2 and not str(path[-1].key).endswith("bias")

    return jax.tree_util.tree_map_with_path(is_matrix, params)
