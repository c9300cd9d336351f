# SPDX-License-Identifier: Apache-2.0
"""Loads a run's model on the workers of the run's plan.

Owns how the workers of a run that is not in progress start, connect and get the weights
of a checkpoint: each reads its own layers, as in a run that resumes. It writes nothing.
Does not own the requests to the workers (`hetjax/serving/model_on_plan.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hetjax.api.run_checkpoints import AskedStep
from hetjax.checkpoint.recovery_plan import PartialSnapshot
from hetjax.checkpoint.run_identity import is_ours
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.checkpoint.stored_steps import in_store
from hetjax.cluster.cluster_files import cluster_toml, parse_cluster
from hetjax.errors import BadInput
from hetjax.models.model import Model
from hetjax.models.named import allowed_name
from hetjax.optimizers.optimizer import optimizer
from hetjax.plans.plan_files import parse_plan
from hetjax.runtime.control import recovery
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.rpc.schema import Json
from hetjax.serving.model_on_plan import ModelOnPlan, workers_stay
from hetjax.training.directory import rundir
from hetjax.training.directory.best import best_of, losses_of
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.progress import checkpoint_storage
from hetjax.training.directory.reopened import reopened
from hetjax.training.directory.rundir import Previous
from hetjax.training.launchers import launcher_of
from hetjax.training.layout.hardware import (
    Hardware,
    choose_hardware,
    with_needed_launcher,
)
from hetjax.training.layout.plan_choice import precise_plan
from hetjax.training.serving_worker import (
    ServingWork,
    model_of,
    serving_settings,
    stages_for,
)
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.presets import Preset
from hetjax.training.worker import device_kinds, first_weights


@contextmanager
def on_plan(
    run_dir: Path,
    *,
    step: AskedStep = None,
    ema: bool = False,
    allow_model_code: str | None = None,
    doing: Callable[[str], None] = lambda what: None,
) -> Iterator[ModelOnPlan]:
    """Start the workers of the run's plan, and give them the weights of a step.

    `doing` gets a line for each slow phase. A function is called as the model only if
    `allow_model_code` names it. Raises BadInput if the run is in progress, if there is
    no such checkpoint, or if the run's devices are not here.
    """
    previous = rundir.read_previous(run_dir)
    assert previous is not None, run_dir
    with rundir.locked(run_dir), ExitStack() as stack:
        doing("looking for the run's devices")
        config, hardware = _hardware(previous, run_dir)
        name = allowed_name(config.model, allow_model_code)
        config = replace(config, model=name)
        settings = _settings(config, hardware, previous, ema)
        plan, model = parse_plan(settings["plan"]), model_of(settings, config)
        work = partial(_work_here, config, hardware, model)
        launcher = launcher_of(config, hardware, 0, work, stack)
        controller = Controller(plan, launcher.connections, hardware.cluster.nodes)
        with workers_stay():
            doing("starting workers")
            launcher.start(controller.workers)
            controller.build(settings)
            controller.connect(config.transport)
            doing("reading weights")
            storage = checkpoint_storage(config, previous.run)
            found = _restored(controller, config, storage, step)
        yield ModelOnPlan(model=model, plan=plan, step=found, controller=controller)
        with workers_stay():
            controller.end()


def _hardware(previous: Previous, run_dir: Path) -> tuple[RunConfig, Hardware]:
    """Return the settings, with the launcher, and the run's devices. Raises BadInput if
    the devices are not here."""
    config = reopened(previous, run_dir)
    preset = Preset(summary="", config=config, cluster=run_dir / rundir.CLUSTER)
    try:
        config = with_needed_launcher(config, previous.cluster)
        return config, choose_hardware(config, preset, previous.cluster)
    except BadInput as bad:
        raise BadInput(
            got=f"--on plan, but the run's cluster is not here: {bad.got}",
            allowed=f"the machines of {run_dir / rundir.CLUSTER}: {bad.allowed}",
            fix="type this on the run's machines, or give --on one-device",
        ) from bad


def _settings(
    config: RunConfig, hardware: Hardware, previous: Previous, ema: bool
) -> dict[str, Any]:
    """Return the settings for workers; nothing is packed, even if training packed."""
    cluster = hardware.cluster
    plan = replace(previous.needed_plan(), packed=False, predicted=None)
    plan = precise_plan(config, model_of({}, config), cluster, plan)
    return serving_settings(config, cluster_toml(cluster), plan, ema=ema)


def _work_here(
    config: RunConfig, hardware: Hardware, model: Model, settings: Json
) -> ServingWork:
    """Return the work of the worker in this process, from its settings."""
    runtime = stages_for(settings)(
        parse_plan(settings["plan"]),
        model,
        hardware.devices,
        optimizer(config.optimizer, config.steps),
        weights=first_weights(config, model),
        kinds=device_kinds(config, parse_cluster(settings["cluster"])),
    )
    return ServingWork(runtime=runtime)


def _restored(
    controller: Controller,
    config: RunConfig,
    storage: CheckpointStorage,
    asked: AskedStep,
) -> int:
    """Give all workers the weights of a step; return that step."""
    held = recovery.on_disk(controller.connections, controller.workers, storage, {})
    held += in_store(storage.store(), storage.key())
    held = [one for one in held if is_ours(storage.run, one.run)]
    step = _best(config, held) if asked == "best" else asked
    some = [h for h in held if step in (None, h.save[0])]
    restored = recovery.restore(controller, some, storage, most=step)
    if restored is not None and step in (None, restored.step):
        return restored.step
    there = ", ".join(map(str, sorted({h.save[0] for h in held}))) or "none"
    leave = "" if asked is None else "leave --step out, or "
    raise BadInput(
        got=f"no complete checkpoint{'' if step is None else f' of step {step}'} on "
        f"the disks of the run's workers in {storage.directory}, or in the store "
        f"{storage.cloud or '(the run has none)'}",
        allowed=f"a step with all of its parts; steps with any part: {there}",
        fix=f"{leave}run this on the machines with the other parts",
    )


def _best(config: RunConfig, held: Sequence[PartialSnapshot]) -> int:
    metrics = read_journal(config.run_dir / rundir.METRICS)
    found = best_of(losses_of(metrics), {h.save[0] for h in held})
    if found is None:
        raise BadInput(
            got="--step best, but no checkpoint of the run in "
            f"{str(config.run_dir)!r} was evaluated",
            allowed="runs with an evaluation at a saved step",
            fix="leave --step out, to use the newest checkpoint",
        )
    return found
