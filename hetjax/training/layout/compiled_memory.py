# SPDX-License-Identifier: Apache-2.0
"""Keeps the compiler's figures for the memory of a run's programs in its directory.

Owns when the figures are taken, which are kept, and the error or warning for a plan
that does not fit. Does not own the figures' use in costs (`costs/measured/compiled.py`)
nor the next plan (`training/open_run.py`).
"""

import warnings
from collections.abc import Callable
from pathlib import Path

from hetjax.cluster.cluster import Cluster
from hetjax.costs.measured.compiled import (
    NOTHING,
    CompiledBytes,
    PlanPrograms,
    by_program,
    merged,
    read_compiled,
    write_compiled,
)
from hetjax.costs.plan_costs import stage_devices
from hetjax.errors import NoFeasiblePlan
from hetjax.models.model import Model
from hetjax.optimizers.optimizer import optimizer
from hetjax.planner.model.costing import check_plan_fits
from hetjax.plans.plan import Plan, StageKey
from hetjax.runtime.control.controller import Controller
from hetjax.training.directory.rundir import COMPILED, COMPILED_DETERMINISTIC
from hetjax.training.settings.config import RunConfig, is_virtual

Progress = Callable[[int, int], None]


def read_run_compiled(config: RunConfig) -> CompiledBytes:
    """Return the compilers' figures for the run's programs so far."""
    path = _path(config)
    return read_compiled(path) if path.exists() else NOTHING


def _path(config: RunConfig) -> Path:
    """Return the file of the figures; deterministic programs have their own."""
    name = COMPILED_DETERMINISTIC if config.deterministic else COMPILED
    return config.run_dir / name


def compile_all(
    config: RunConfig,
    model: Model,
    precise: Callable[[Cluster, Plan], Plan],
    controller: Controller,
    cluster: Cluster,
    progress: Progress | None = None,
) -> None:
    """Compile the controller's plan, and keep the compiler's figures for its memory.

    `precise` returns the plan with the precision and attention of its stages. Raises
    NoFeasiblePlan if by these figures the plan needs more memory than there is.
    """
    controller.compile(progress)
    plan = precise(cluster, controller.plan)
    found = _found(config, model, plan, cluster, controller.compiled_bytes())
    if not found:
        return
    known = read_run_compiled(config)
    if merged(known, found) != known:
        write_compiled(_path(config), merged(known, found))
    try:
        check_plan_fits(
            plan,
            model,
            cluster,
            dtype=config.dtype,
            attention=config.attention,
            optimizer=optimizer(config.optimizer, config.steps).init,
            compiled=found,
        )
    except NoFeasiblePlan as none:
        got = f"after compilation, by the compiler's own figures, {none.got}"
        raise NoFeasiblePlan(got=got, allowed=none.allowed, fix=none.fix) from none


def compile_again(
    config: RunConfig,
    model: Model,
    precise: Callable[[Cluster, Plan], Plan],
    controller: Controller,
    cluster: Cluster,
) -> None:
    """Do the same for a run that is under way, but only warn if memory is short."""
    try:
        compile_all(config, model, precise, controller, cluster)
    except NoFeasiblePlan as none:
        warnings.warn(f"memory may run out: {none.got}", stacklevel=2)


def _found(
    config: RunConfig,
    model: Model,
    plan: Plan,
    cluster: Cluster,
    sizes_by_stage: dict[StageKey, dict[str, int]],
) -> CompiledBytes:
    """Return the figures by program; none from CPUs that stand in for other devices."""
    devices = stage_devices(plan, cluster)
    init = optimizer(config.optimizer, config.steps).init
    real = {
        key: sizes
        for key, sizes in sizes_by_stage.items()
        if devices[key] == "cpu" or not is_virtual(config)
    }
    return by_program(PlanPrograms.from_plan(plan, model, devices, init), real)
