# SPDX-License-Identifier: Apache-2.0
"""Every test sees 16 simulated CPU devices and the strictest JAX."""

import hypothesis
import jax
import pytest

from hetjax.mesh.simulated import simulate_devices

simulate_devices(16)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)  # compiling dominates here

hypothesis.settings.register_profile("hetjax", deadline=None)
hypothesis.settings.load_profile("hetjax")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--plans", type=int, default=40, help="random plans to hold against one jit"
    )
