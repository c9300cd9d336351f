# SPDX-License-Identifier: Apache-2.0
"""What everything else starts from: clusters, models and plans, by name or from files.

Owns the public names. Does not own the files (`cluster/cluster_files.py`,
`plans/plan_files.py`), nor the models (`models/presets.py`).
"""

from pathlib import Path
from typing import TYPE_CHECKING

from hetjax.cluster.cluster import Cluster
from hetjax.cluster.cluster_files import load_cluster
from hetjax.plans.plan import Plan
from hetjax.plans.plan_files import read_plan, write_plan

if TYPE_CHECKING:
    from hetjax.models.model import Model

__all__ = ["discover", "load_cluster", "load_model", "load_plan", "save_plan"]


def discover() -> Cluster:
    """Return the cluster that the devices of this process make; starts JAX.

    A kind that the catalogue lacks is measured, which takes up to 20 seconds the first
    time; a warning tells what was found.

    >>> discover().name
    'local'
    """
    from hetjax.training.layout.hardware import cluster_of  # JAX takes a second

    return cluster_of(None)


def load_model(name: str) -> "Model":
    """Return the model of that name; BadInput lists the names if there is none.

    >>> model = load_model("tiny")
    >>> len(model.layers), model.max_seq_len
    (6, 128)
    """
    from hetjax.models.named import TypedName, load_named  # JAX takes a second

    return load_named(TypedName(name))


def load_plan(path: str | Path) -> Plan:
    """Read a plan file; BadInput says what in it cannot be.

    >>> load_plan("mine.json")
    Traceback (most recent call last):
    ...
    hetjax.errors.BadInput: got: plan file 'mine.json': No such file or directory
    ...
    """
    return read_plan(path)


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan file, which `train` and `simulate` take.

    >>> from tempfile import TemporaryDirectory
    >>> from hetjax.training.settings.presets import preset
    >>> plan = load_plan(preset("tiny").plan)
    >>> with TemporaryDirectory() as folder:
    ...     save_plan(plan, f"{folder}/plan.json")
    ...     load_plan(f"{folder}/plan.json") == plan
    True
    """
    write_plan(Path(path), plan)
