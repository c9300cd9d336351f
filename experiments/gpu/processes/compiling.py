# SPDX-License-Identifier: Apache-2.0
"""Sets how processes of a session compile: quickly, or to the same bits.

For a GPU, XLA compiles and times many Triton kernels for each product, and keeps the
fastest. A program for an H200 takes 1 to 3 s on many cores. Owns the variables that
change this. Does not own which processes get them.
"""

import os
from collections.abc import Mapping

QUICKLY = "--xla_gpu_enable_triton_gemm=false"
TO_THE_SAME_BITS = "--xla_gpu_exclude_nondeterministic_ops=true"


def with_flag(flag: str) -> Mapping[str, str]:
    """Return the environment variables that add one flag of XLA."""
    return {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()}


def quickly(platform: str) -> Mapping[str, str]:
    """Return the variables of processes that compile much in little time.

    Only cuBLAS's products remain, so compare such processes only with each other.
    """
    return with_flag(QUICKLY) if platform == "cuda" else {}


def noted(platform: str) -> str:
    """Return the suffix that notes this flag in the rows of such processes."""
    return f"; {QUICKLY}" if platform == "cuda" else ""
