# SPDX-License-Identifier: Apache-2.0
"""Loads clusters, models and plans, by name or from files.

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
    """Return the cluster of the devices that this process sees. Starts JAX.

    It measures a kind that the catalogue lacks, which takes up to 20 seconds the first
    time; a warning shows the result.

    >>> discover().name
    'local'
    """
    from hetjax.training.layout.hardware import cluster_of  # JAX takes a second

    return cluster_of(None)


def load_model(name: str) -> "Model":
    """Return the model of that name. Raises BadInput, with all names, if unknown.

    >>> model = load_model("tiny")
    >>> len(model.layers), model.max_seq_len
    (6, 128)
    """
    from hetjax.models.named import TypedName, load_named  # JAX takes a second

    return load_named(TypedName(name))


def load_plan(path: str | Path) -> Plan:
    """Read a plan file. Raises BadInput, which says what is wrong in it.

    >>> load_plan("mine.json")
    Traceback (most recent call last):
    ...
    hetjax.errors.BadInput: got: plan file 'mine.json': No such file or directory
    ...
    """
    return read_plan(path)


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan file for `train` and `simulate`.

    >>> from tempfile import TemporaryDirectory
    >>> from hetjax.training.settings.presets import preset
    >>> plan = load_plan(preset("tiny").plan)
    >>> with TemporaryDirectory() as folder:
    ...     save_plan(plan, f"{folder}/plan.json")
    ...     load_plan(f"{folder}/plan.json") == plan
    True
    """
    write_plan(Path(path), plan)
