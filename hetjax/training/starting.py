# SPDX-License-Identifier: Apache-2.0
"""From what a start has settled to a run that has its state and can take steps.

Owns which driver that is, and what workers are told. Does not own what is settled, nor
what a start writes (`run.py`).
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from hetjax.checkpoint.format import AttemptNames
from hetjax.checkpoint.reader import (
    Checkpoint,
    DamagedCheckpoint,
    attempts,
    damaged_after,
)
from hetjax.checkpoint.recovery_plan import PartialSnapshot
from hetjax.checkpoint.stored_steps import in_store
from hetjax.cluster.files import cluster_toml
from hetjax.data.dataset import Dataset
from hetjax.elastic.driver import FleetDriver, Terms
from hetjax.elastic.following import Following
from hetjax.elastic.foresight import Foresight, Replan
from hetjax.elastic.membership import Membership
from hetjax.elastic.notices import Notice
from hetjax.errors import BadInput
from hetjax.launch.compiled import keep_compiled
from hetjax.launch.launching import Launcher, OnThisMachine, started
from hetjax.models.model import Model
from hetjax.plans.members import EMBEDDED, node_of
from hetjax.plans.plan import Plan
from hetjax.report.progress import Display
from hetjax.runtime.fleet import Fleet
from hetjax.runtime.recovery import Restored, on_disk, restore
from hetjax.runtime.stage_runtime import StageRuntime
from hetjax.training.ahead import Planning
from hetjax.training.config import RunConfig
from hetjax.training.driving import Driver
from hetjax.training.feed import held_out, training_feed
from hetjax.training.identity import check_identity, identity
from hetjax.training.local import LocalDriver
from hetjax.training.on_ray import OnRay
from hetjax.training.optimizer import optimizer
from hetjax.training.placement import Choice, Hardware, next_plan
from hetjax.training.reached import (
    Progress,
    checkpoint_before,
    checkpoint_storage,
)
from hetjax.training.rundir import LOGS, Previous
from hetjax.training.worker import worker_settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a start has settled before it writes anything."""

    config: RunConfig
    model: Model
    hardware: Hardware
    choice: Choice
    dataset: Dataset
    previous: Previous | None
    progress: Progress


def driver_of(
    start: Start, shown: Display, noticed: Callable[[Notice], None]
) -> Driver:
    """Compile the plan's programs and fill in the state to start from.

    `noticed` is called, from other threads, with what workers hear of their machines.
    """
    if start.config.launcher == EMBEDDED:
        return _local(start, shown)
    return _fleet(start, shown, noticed)


def _local(start: Start, shown: Display) -> LocalDriver:
    config, first = start.config, start.progress.checkpoint
    keep_compiled(config.data.cache_dir.expanduser())
    feed = training_feed(config, start.dataset)
    validation = held_out(config, start.dataset)
    rule, host = optimizer(config.optimizer, config.steps), _host(start)

    def build(plan: Plan) -> StageRuntime:
        return StageRuntime(
            plan,
            start.model,
            start.hardware.devices,
            rule,
            dtype=config.dtype,
            clip_norm=config.optimizer.clip_norm,
        )

    runtime = build(start.choice.plan)
    if first is not None:
        _check_fits(first, runtime, host)
    runtime.compile(shown.compiled)
    checkpoint = first and _restored_here(first, runtime, host, config, shown)
    if checkpoint is None:
        runtime.initialise(config.seed)
    return LocalDriver(
        runtime,
        feed,
        validation,
        checkpoint_storage(config).saver(EMBEDDED),
        host,
        build,
        _following(start),
        attempts=AttemptNames(attempts(checkpoint_storage(config).at(EMBEDDED))),
        at=0 if checkpoint is None else checkpoint.step,
        resumed=checkpoint and _origin(checkpoint),
    )


def _restored_here(
    checkpoint: Checkpoint,
    runtime: StageRuntime,
    host: Mapping[str, Any],
    config: RunConfig,
    shown: Display,
) -> Checkpoint:
    """Fill in the newest state that is as it was saved; return where it is from.

    Raises DamagedCheckpoint where none is.
    """
    while True:
        try:
            runtime.restore(checkpoint.read)
            return checkpoint
        except DamagedCheckpoint as damage:
            older = checkpoint_before(config, shown, checkpoint.step)
            if older is None:
                raise
            _check_fits(older, runtime, host)
            text = f"{damage.got}; going on from step {older.step} instead"
            warnings.warn(text, stacklevel=2)
            checkpoint = older


def _check_fits(
    checkpoint: Checkpoint, runtime: StageRuntime, host: Mapping[str, Any]
) -> None:
    """Raise BadInput if the checkpoint is of another run or another model."""
    where = str(checkpoint.path.parent)
    _check_same_run(checkpoint.host, host, checkpoint.step, where)
    checkpoint.check_same_model(runtime.abstract_entries())


def _origin(checkpoint: Checkpoint) -> dict[str, Any]:
    """What events say of a state that this process has read itself."""
    damaged = damaged_after(checkpoint.path.parent, checkpoint.step)
    told = {"passed_over": damaged} if damaged else {}
    return {"checkpoint": str(checkpoint.path), **told}


def _following(start: Start) -> Following | None:
    config, cluster = start.config, start.hardware.cluster
    if config.recovery == "none":
        return None
    return Following(cluster, Membership(cluster, config.cluster), _replan(start))


def _fleet(
    start: Start, shown: Display, noticed: Callable[[Notice], None]
) -> FleetDriver:
    config, plan, cluster = start.config, start.choice.plan, start.hardware.cluster
    num_validation = len(held_out(config, start.dataset))
    with ExitStack() as stack:
        launcher = _launcher(start, stack)
        launcher.crew.noticed = lambda worker, told: noticed(
            Notice(source=told.source, grace_s=told.grace_s, node=node_of(worker))
        )
        terms = _terms(start, launcher)
        stack.callback(terms.foresight.close)
        fleet = started(launcher, plan, cluster.nodes)
        shown.note(f"workers ({config.launcher}): {', '.join(fleet.workers)}")
        fleet.build(terms.settings(cluster, plan))
        fleet.connect(terms.transport)
        fleet.compile(shown.compiled)
        restored = _restored(fleet, terms, start)
        return FleetDriver(
            fleet,
            launcher,
            stack.pop_all(),
            terms,
            cluster=cluster,
            at=0 if restored is None else restored.step,
            resumed=restored
            and {"bytes": restored.num_bytes, "seconds": restored.seconds},
            num_validation=num_validation,
        )


def _terms(start: Start, launcher: Launcher) -> Terms:
    config = start.config
    return Terms(
        settings=lambda cluster, plan: worker_settings(
            config, cluster_toml(cluster), plan, start.dataset
        ),
        foresight=Foresight(
            _replan(start), partial(Planning, config), config.foresee_after_s
        ),
        membership=Membership(start.hardware.cluster, config.cluster, launcher.present),
        transport=config.transport,
        seed=config.seed,
        keeping=checkpoint_storage(config),
        host=_host(start),
        recovery=config.recovery,
    )


def _replan(start: Start) -> Replan:
    config, model = start.config, start.model
    # who asks whether there is a plan asks for it next
    return lru_cache(maxsize=4)(
        lambda cluster, current: next_plan(config, model, cluster, current)
    )


def _restored(fleet: Fleet, terms: Terms, start: Start) -> Restored | None:
    """Bring the fleet to the newest save there is; None if it begins anew."""
    storage, held = terms.keeping, list[PartialSnapshot]()
    if terms.recovery != "cloud-only":
        held = on_disk(fleet.crew, fleet.workers, storage)
    stored = in_store(storage.store())
    for snapshot in [*held, *stored]:
        where = storage.directory if snapshot.worker else str(storage.cloud)
        _check_same_run(snapshot.host, terms.host, snapshot.save[0], where)
    restored = restore(fleet, [*held, *stored], storage)
    if restored is None:
        _check_begins(held, start)
        fleet.initialise(terms.seed)
        return None
    fleet.saved = restored.step
    return restored


def _check_begins(held: Sequence[PartialSnapshot], start: Start) -> None:
    """Raise BadInput if the run has saved before, and some of that is missing."""
    config, saved = start.config, start.progress.saved
    if saved is None or not (held or config.checkpoint.local):
        return
    where, cloud = checkpoint_storage(config).directory, config.checkpoint.cloud
    steps = sorted({snapshot.save[0] for snapshot in held})
    there = f"parts of {', '.join(map(str, steps))}" if steps else "nothing"
    raise BadInput(
        got=f"no complete checkpoint of a run that has saved step {saved}: its workers "
        f"have {there} in {where}, and the store is {cloud or 'none'}",
        allowed="all slices of a step on the disks of the workers or in the store",
        fix="start with the nodes that have the rest, give --checkpoint.cloud, or "
        "start anew with another --run-dir",
    )


def _launcher(start: Start, stack: ExitStack) -> Launcher:
    config, cluster = start.config, start.hardware.cluster
    if config.launcher == "ray":
        discovered = start.hardware.discovered
        return OnRay(
            cluster,
            stack,
            simulate=config.simulate,
            discovered=discovered,
            patience=config.patience,
        )
    return OnThisMachine(config.run_dir / LOGS, stack, patience=config.patience)


def _host(start: Start) -> dict[str, Any]:
    """What a checkpoint says besides its state."""
    return {"run": identity(start.config, start.dataset)}


def _check_same_run(
    found: Mapping[str, Any], own: Mapping[str, Any], step: int, where: str
) -> None:
    """Compare what a checkpoint and this run say besides their state (`_host`)."""
    check_identity(found.get("run", {}), own["run"], step, where)
