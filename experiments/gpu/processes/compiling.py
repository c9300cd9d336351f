# SPDX-License-Identifier: Apache-2.0
"""How processes of a session compile: quickly, or to the same bits.

For a GPU, XLA compiles and times many Triton kernels for each product, 1 to 3 s of many
cores for a program of an H200, and keeps the fastest. Owns the variables that change
that. Does not own who is given them.
"""

import os
from collections.abc import Mapping

QUICKLY = "--xla_gpu_enable_triton_gemm=false"
TO_THE_SAME_BITS = "--xla_gpu_exclude_nondeterministic_ops=true"


def with_flag(flag: str) -> Mapping[str, str]:
    """Return what a process has to have in its environment for one more flag of XLA."""
    return {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()}


def quickly(platform: str) -> Mapping[str, str]:
    """Return the variables of processes that compile much in little time.

    cuBLAS's products alone are left, so that only like may be compared with like.
    """
    return with_flag(QUICKLY) if platform == "cuda" else {}


def noted(platform: str) -> str:
    """Return what the rows of such processes say of it, after what else they say."""
    return f"; {QUICKLY}" if platform == "cuda" else ""
