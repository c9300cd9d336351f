# SPDX-License-Identifier: Apache-2.0
"""Every test sees 16 simulated CPU devices and the strictest JAX."""

import os

os.environ.setdefault("PJRT_NPROC", "64")  # 4 x devices: fewer can starve transfers

import hypothesis
import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)  # compiling dominates here

hypothesis.settings.register_profile("hetjax", deadline=None)
hypothesis.settings.load_profile("hetjax")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--plans", type=int, default=40, help="random plans to hold against one jit"
    )
