# SPDX-License-Identifier: Apache-2.0
"""Every test sees 16 simulated CPU devices and the strictest JAX."""

import os

import hypothesis
import jax
import pytest

from hetjax.mesh.simulated import simulate_devices

# one LLVM module per program: the programs of the tests are too small to be split
FLAGS = "--xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
simulate_devices(16)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)  # compiling dominates here

# the plain emitters of JAX 0.10 compile three times as fast; later ones have no other
QUICK = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}

hypothesis.settings.register_profile("hetjax", deadline=None)
hypothesis.settings.load_profile("hetjax")


@pytest.fixture
def quick_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile ahead of time in a third of the time, for tests that allow rounding."""
    compile_ = jax.stages.Lowered.compile

    def quick(self: jax.stages.Lowered, compiler_options: dict | None = None):
        return compile_(self, compiler_options=QUICK | (compiler_options or {}))

    monkeypatch.setattr(jax.stages.Lowered, "compile", quick)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--plans", type=int, default=40, help="random plans to hold against one jit"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests that share compiled programs on one worker (`--dist loadgroup`).

    The random plans share nothing: they go last, one by one, to whoever is free.
    """
    items.sort(key=_is_random_plan)
    for item in items:
        if not _is_random_plan(item):
            room = item.path.relative_to(item.config.rootpath / "tests").parts[0]
            group = room if room == "training" else item.path.name
            item.add_marker(pytest.mark.xdist_group(group))


def _is_random_plan(item: pytest.Item) -> bool:
    return "plan_seed" in getattr(item, "fixturenames", ())
