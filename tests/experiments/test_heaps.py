# SPDX-License-Identifier: Apache-2.0
"""Heaps read from XLA's dumps equal what a CPU's compiler reports."""

import os
import subprocess
import sys

# In a separate process: XLA reads where to dump once, before the first program.
PROGRAM = """
import jax, jax.numpy as jnp
from experiments.compiled_memory.heaps import dump_heaps, heap_bytes

dump_heaps()

def compiled(size):
    def ordered(x):
        return jnp.sort(x @ x, axis=0) @ jnp.sort(x, axis=1)
    return jax.jit(ordered).lower(jnp.ones((size, size))).compile()

small, large = compiled(64), compiled(96)
assert heap_bytes(large) == large.memory_analysis().temp_size_in_bytes > 96 * 96 * 4
assert heap_bytes(large) == large.memory_analysis().temp_size_in_bytes  # dump is gone
other = compiled(80)
assert heap_bytes(other) == other.memory_analysis().temp_size_in_bytes
"""


def test_a_heap_is_what_the_compiler_tells_and_of_the_last_program_of_a_name():
    # a cached program is not compiled, and leaves no dump
    env = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
