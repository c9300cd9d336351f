# SPDX-License-Identifier: Apache-2.0
"""hetjax: train one model on unlike accelerators.

>>> import hetjax
>>> hetjax.load_cluster("tiny").num_devices
5
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetjax.api.doctor import diagnose as diagnose
    from hetjax.api.exporting import export_model as export_model
    from hetjax.api.loading import discover as discover
    from hetjax.api.loading import load_cluster as load_cluster
    from hetjax.api.loading import load_model as load_model
    from hetjax.api.loading import load_plan as load_plan
    from hetjax.api.loading import save_plan as save_plan
    from hetjax.api.planning import compare_planners as compare_planners
    from hetjax.api.planning import find_plan as find_plan
    from hetjax.api.profiling import measure_profile as measure_profile
    from hetjax.api.simulating import simulate_plan as simulate_plan
    from hetjax.api.trained_model import TrainedModel as TrainedModel
    from hetjax.api.trainer import Trainer as Trainer
    from hetjax.cluster.cluster import Cluster as Cluster
    from hetjax.cluster.cluster import Link as Link
    from hetjax.cluster.cluster import Node as Node
    from hetjax.plans.plan import Plan as Plan
    from hetjax.training.observers.observer import Observer as Observer
    from hetjax.training.observers.run_reports import report_of as report_of
    from hetjax.training.settings.config import RunConfig as RunConfig

    __version__: str

_MODULES = {
    "Cluster": "cluster.cluster",
    "Link": "cluster.cluster",
    "Node": "cluster.cluster",
    "Observer": "training.observers.observer",
    "Plan": "plans.plan",
    "RunConfig": "training.settings.config",
    "TrainedModel": "api.trained_model",
    "Trainer": "api.trainer",
    "compare_planners": "api.planning",
    "diagnose": "api.doctor",
    "discover": "api.loading",
    "export_model": "api.exporting",
    "find_plan": "api.planning",
    "load_cluster": "api.loading",
    "load_model": "api.loading",
    "load_plan": "api.loading",
    "measure_profile": "api.profiling",
    "report_of": "training.observers.run_reports",
    "save_plan": "api.loading",
    "simulate_plan": "api.simulating",
}
__all__ = [*_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]

# Set before the import of JAX, which reads it once. Errors of its compiler also come as
# exceptions, and users cannot act on its other output ("Very slow compile?", processor
# features of cached programs). 0 shows all of it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


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
