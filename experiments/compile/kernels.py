# SPDX-License-Identifier: Apache-2.0
"""Kernels of products where there is no device to try them on.

On a GPU XLA compiles many kernels of its own for every product, and cuBLAS's, leaves
out what does not compile, and takes the quickest. Without one it takes its first guess
unseen, and where that does not compile it refuses the whole program. So it does with
products that sum over heads of 80, of several sequences: the guess sums in parts of
more than 16 numbers, and of these none divides 80. What is refused for that reason
alone is compiled once more, in parts of 16, or else with cuBLAS's kernels.

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

# They live as long as the process, so that none is taken for a later one.
_OTHER_CHOICES: dict[int, Any] = {}


def compiled(
    compile_with: Callable[[dict[str, Any] | None], Any],
    options: dict[str, Any] | None,
    others: Sequence[dict[str, Any]] = (SMALL_PARTS, CUBLAS),
) -> Any:
    """Compile with these options, and with others besides where a guess is refused.

    Whatever else the compiler says is the program's own fault, and raised.
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
    """Whether the first guess was refused."""
    return id(program) in _OTHER_CHOICES
