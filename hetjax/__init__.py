# SPDX-License-Identifier: Apache-2.0
"""hetjax: train one model on unlike accelerators.

>>> import hetjax
>>> hetjax.load_cluster("tiny").num_devices
5
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetjax.api.loading import (
        discover,
        load_cluster,
        load_model,
        load_plan,
        save_plan,
    )
    from hetjax.api.planning import compare_planners, find_plan
    from hetjax.api.profiling import measure_profile
    from hetjax.api.simulating import simulate_plan
    from hetjax.api.trainer import Trainer
    from hetjax.plans.plan import Plan
    from hetjax.training.config import RunConfig

    __version__: str

__all__ = [
    "Plan",
    "RunConfig",
    "Trainer",
    "compare_planners",
    "discover",
    "find_plan",
    "load_cluster",
    "load_model",
    "load_plan",
    "measure_profile",
    "save_plan",
    "simulate_plan",
]

# Before JAX is imported, which reads it once: its compiler's errors come as exceptions,
# too, and the rest of what it prints ("Very slow compile?", processor features of kept
# programs) is nothing that a user can act on. 0 shows all of it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

_MODULES = {
    "Plan": "plans.plan",
    "RunConfig": "training.config",
    "Trainer": "api.trainer",
    "compare_planners": "api.planning",
    "discover": "api.loading",
    "find_plan": "api.planning",
    "load_cluster": "api.loading",
    "load_model": "api.loading",
    "load_plan": "api.loading",
    "measure_profile": "api.profiling",
    "save_plan": "api.loading",
    "simulate_plan": "api.simulating",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use (PEP 562): JAX and solvers take seconds."""
    if name == "__version__":
        from importlib.metadata import version

        return version("hetjax")
    if name not in _MODULES:
        raise AttributeError(f"module 'hetjax' has no attribute {name!r}")
    from importlib import import_module

    found = getattr(import_module(f"hetjax.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
