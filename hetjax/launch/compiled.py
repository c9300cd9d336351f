# SPDX-License-Identifier: Apache-2.0
"""Compiled programs kept on disk: who starts again need not compile."""

import os
from pathlib import Path

import jax

_FOLDER = "compiled"
_MOST_BYTES = 8 << 30  # the least used go first


def keep_compiled(cache_dir: Path) -> None:
    """Let JAX keep all it compiles in this folder, unless its own variable says where.

    To be called before anything is compiled.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_dir / _FOLDER))
    jax.config.update("jax_compilation_cache_max_size", _MOST_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
