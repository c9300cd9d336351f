# SPDX-License-Identifier: Apache-2.0
"""Selects kernels of products when there is no device to try them on.

On a GPU, XLA compiles many of its own kernels for every product, and cuBLAS's kernels.
It skips those that do not compile, and takes the fastest. Without a GPU, XLA takes its
first guess untested. If the guess does not compile, XLA refuses the whole program. This
happens to products that sum over a head size of 80 in a batch of several sequences: the
guess sums in blocks of a power of two above 16, and none of these divides 80. A program
that is refused for this reason alone is compiled again with blocks of 16, or else with
cuBLAS's kernels.

Owns these other choices. Does not own what is made of a program (`compiling.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

SMALL_PARTS = {
    "xla_gpu_override_gemm_autotuner": "block_m: 64 block_n: 64 block_k: 16 "
    "num_stages: 1 num_warps: 4 num_ctas: 1"
}
CUBLAS = {"xla_gpu_enable_triton_gemm": False}
_REFUSED = "Couldn't find output tile sizes"

# Keeps the programs alive, so that no later program gets the id of an earlier one.
_OTHER_CHOICES: dict[int, Any] = {}


def compiled(
    compile_with: Callable[[dict[str, Any] | None], Any],
    options: dict[str, Any] | None,
    others: Sequence[dict[str, Any]] = (SMALL_PARTS, CUBLAS),
) -> Any:
    """Compile with these options; if a guess is refused, add the other choices in turn.

    Raises the compiler's error if it has any other reason.
    """
    try:
        return compile_with(options)
    except jax.errors.JaxRuntimeError as error:
        if _REFUSED not in str(error) or not others:
            raise
    program = compiled(compile_with, (options or {}) | others[0], others[1:])
    _OTHER_CHOICES[id(program)] = program
    return program


def is_other_choice(program: Any) -> bool:
    """Return whether the first guess was refused."""
    return id(program) in _OTHER_CHOICES
