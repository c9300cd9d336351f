# SPDX-License-Identifier: Apache-2.0
"""From what a start has settled to a run that has its state and can take steps.

Owns how far the run has come before, by its directory and its store, which driver it
gets, and what workers are told. Does not own what else is settled, nor what a start
writes (`run.py`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from hetjax.checkpoint.fetching import fetch_newest
from hetjax.checkpoint.format import AttemptNames, step_directory
from hetjax.checkpoint.reader import (
    Checkpoint,
    DamagedCheckpoint,
    damaged_after,
    steps,
)
from hetjax.checkpoint.recovery_plan import PartialSnapshot
from hetjax.checkpoint.run_identity import RunIdentity
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.cluster.cluster import Cluster, Precision
from hetjax.cluster.cluster_files import cluster_toml, parse_cluster
from hetjax.data.batches import Batch, weights
from hetjax.data.dataset import Dataset
from hetjax.elastic.driver import Driver
from hetjax.elastic.loss_scaling import LossScaling
from hetjax.elastic.membership import Membership
from hetjax.elastic.notices import Notice
from hetjax.elastic.spikes import SpikeRule
from hetjax.elastic.standby_plans import StandbyPlans
from hetjax.elastic.step_checking import StepChecking
from hetjax.elastic.terms import Terms
from hetjax.errors import BadInput
from hetjax.launch.launching import Launcher
from hetjax.models.attention import head_sizes
from hetjax.models.model import Model
from hetjax.plans.attention import with_attentions, without_kernels
from hetjax.plans.plan import Plan, StageKey
from hetjax.plans.plan_files import parse_plan
from hetjax.plans.precision import with_precisions
from hetjax.plans.worker_map import EMBEDDED, node_of
from hetjax.report.progress import Display
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.control.recovery import Restored
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.runtime.rpc.schema import Json
from hetjax.training import rundir
from hetjax.training.ahead import Planning
from hetjax.training.best import BestCheckpoint
from hetjax.training.compiled_memory import compile_again, compile_all
from hetjax.training.config import RunConfig
from hetjax.training.hardware import Hardware, is_virtual
from hetjax.training.identity import Claim, provisional, settled
from hetjax.training.launchers import launcher_of
from hetjax.training.leases import Leases
from hetjax.training.left_checkpoints import (
    check_begins,
    check_is_of_run,
    identify,
    saved_here,
)
from hetjax.training.optimizer import optimizer
from hetjax.training.placement import Choice, next_plan
from hetjax.training.run_settings import kept_settings, settings_to_compare
from hetjax.training.rundir import Previous, read_journal
from hetjax.training.worker import (
    TrainingWork,
    device_kinds,
    first_weights,
    held_out,
    training_feed,
    worker_settings,
)

Metrics = Sequence[Mapping[str, Any]]  # lines of metrics.jsonl


def checkpoint_storage(
    config: RunConfig, run: RunIdentity | None = None
) -> CheckpointStorage:
    """Where the run's checkpoints go; without `run`, those of any run are read."""
    directory = config.checkpoint.local or config.run_dir / rundir.CHECKPOINTS
    key_file = config.checkpoint.key_file
    return CheckpointStorage(
        directory=str(directory.absolute()),
        keep=config.checkpoint.keep,
        copies=config.checkpoint.copies,
        cloud=config.checkpoint.cloud,
        upload_mbit_per_s=config.checkpoint.upload_mbit_per_s,
        key_file=None if key_file is None else str(key_file.absolute()),
        run=run,
        is_local=config.checkpoint.local is not None,
    )


def identified_here(config: RunConfig, claim: Claim, shown: Display) -> Claim:
    """The claim, and of which run it is where all that was saved is seen from here."""
    if config.launcher != EMBEDDED:
        return claim
    storage = checkpoint_storage(config)
    found = saved_here(storage, EMBEDDED)
    return settled(claim, identify(claim, storage, found, shown.note))


def read_progress(
    config: RunConfig, run: RunIdentity, shown: Display
) -> tuple[int | None, bool]:
    """Return the newest step that the run has saved, if any, and whether it is done.

    Of the embedded launcher it is what is complete, and what is newer or missing here
    is fetched; of others what workers have written, who find it when they are there.
    Raises BadInput where more steps are done than the run is to have.
    """
    if config.launcher == EMBEDDED:
        saved = _newest_step(config, run, shown)
    else:
        saved = last_saved(read_journal(config.run_dir / rundir.EVENTS))
    if saved is not None:
        check_reached(saved, config)
    return saved, saved == config.steps and saved in evaluated(config.run_dir)


def check_reached(step: int, config: RunConfig) -> None:
    """Raise BadInput if the run has done more steps than it is to have."""
    if step > config.steps:
        raise BadInput(
            got=f"--steps {config.steps}, and the run in {str(config.run_dir)!r} has "
            f"done {step}",
            allowed=f"steps >= {step}",
            fix=f"give --steps {step} or more, or another --run-dir",
        )


def evaluated(run_dir: Path) -> set[int]:
    """Steps after which the run was evaluated."""
    lines = read_journal(run_dir / rundir.METRICS)
    return {line["step"] for line in lines if "val_loss" in line}


def best_so_far(config: RunConfig) -> BestCheckpoint:
    """Which checkpoint is the best, by what the run has written."""
    metrics, events = (
        read_journal(config.run_dir / name) for name in (rundir.METRICS, rundir.EVENTS)
    )
    return BestCheckpoint.before(metrics, events, config.checkpoint.keep)


def last_saved(events: Iterable[Mapping[str, Any]]) -> int | None:
    """The newest complete checkpoint by the lines of events.jsonl.

    >>> last_saved([{"event": "saved", "step": 9}, {"event": "recovered", "step": 6}])
    6
    """
    found: int | None = None
    for line in events:
        if line["event"] == "saved":
            found = line["step"]
        elif line["event"] in ("recovered", "restored") and found is not None:
            found = min(found, line["step"])
    return found


def _newest_step(config: RunConfig, run: RunIdentity, shown: Display) -> int | None:
    """The newest that is here or in the store, which mends what is damaged here."""
    kept = checkpoint_storage(config, run)
    directory, store = kept.at(EMBEDDED), kept.store()
    key = kept.key()
    newest = max(steps(directory, key, run), default=0)
    fetched = None
    if store is not None:
        fetched = fetch_newest(store, directory, newest - 1, key, run)
    if fetched is not None and fetched.cloud_bytes:
        shown.note(
            f"fetched step {fetched.step} from {config.checkpoint.cloud}: "
            f"{fetched.cloud_bytes:,} bytes in {fetched.seconds:.1f} s, "
            f"{fetched.disk_bytes:,} were here"
        )
    try:
        with rundir.usable(config.run_dir):
            return Checkpoint.open(directory, key=key, run=run).step
    except (DamagedCheckpoint, rundir.Unusable):
        raise  # starting anew would write over what may be mended
    except BadInput:
        return None  # none is complete yet


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a start finds out before it opens the text, and writes anything."""

    config: RunConfig
    model: Model
    hardware: Hardware
    choice: Choice
    previous: Previous | None
    claim: Claim
    saved: int | None
    is_done: bool
    leases: Leases | None = None  # once it is to write

    def check_leases(self) -> None:
        """Raise LeaseLost if the run may not write any more."""
        if self.leases is not None:
            self.leases.check()

    @property
    def number(self) -> int:
        """Greater with each start of the run."""
        return 0 if self.leases is None else self.leases.start

    @property
    def storage(self) -> CheckpointStorage:
        """Where checkpoints go, under the leases."""
        storage = checkpoint_storage(self.config, self.run)
        return storage if self.leases is None else self.leases.of(storage)

    @property
    def run(self) -> RunIdentity:
        """Which run it is, as far as is known before workers have looked."""
        return provisional(self.claim)


def driver_of(
    start: Start, dataset: Dataset, shown: Display, noticed: Callable[[Notice], None]
) -> Driver:
    """Start workers, compile the plan's programs and fill in the state to start from.

    NoFeasiblePlan if the programs turn out to need more memory than there is.
    `noticed` is called, from other threads, with what workers hear of their machines.
    """
    config, plan, cluster = start.config, start.choice.plan, start.hardware.cluster
    validation = held_out(config, dataset)
    with ExitStack() as stack:
        work = partial(_work_here, start, dataset, validation)
        launcher = launcher_of(config, start.hardware, start.number, work, stack)
        launcher.connections.noticed = lambda worker, told: noticed(
            Notice(source=told.source, grace_s=told.grace_s, node=node_of(worker))
        )
        terms = _terms(start, dataset, launcher, shown)
        stack.callback(terms.standby_plans.close)
        controller = Controller(plan, launcher.connections, cluster.nodes)
        controller.new_attempts = AttemptNames(start.run.after + start.number)
        controller.predicts_steps = not is_virtual(config)
        driver = Driver(
            controller,
            launcher,
            terms,
            cluster=cluster,
            validation_weights=weights(validation),
        )
        restored = driver.begin()
        driver.resumed = restored and _origin(restored, config)
        driver.stack = stack.pop_all()
        return driver


def _origin(restored: Restored, config: RunConfig) -> dict[str, Any]:
    """What events say of the state to start from."""
    told = {"bytes": restored.num_bytes, "seconds": restored.seconds}
    if config.launcher != EMBEDDED:
        return told
    directory = checkpoint_storage(config).at(EMBEDDED)
    told["checkpoint"] = str(step_directory(directory, restored.step))
    damaged = damaged_after(directory, restored.step)
    return told | ({"passed_over": damaged} if damaged else {})


def _work_here(
    start: Start, dataset: Dataset, validation: Sequence[Batch], settings: Json
) -> TrainingWork:
    """What the worker in this process makes of its settings."""
    config = start.config
    return TrainingWork(
        runtime=StageRuntime(
            parse_plan(settings["plan"]),
            start.model,
            start.hardware.devices,
            optimizer(config.optimizer, config.steps),
            clip_norm=config.optimizer.clip_norm,
            weights=first_weights(config, start.model),
            kinds=device_kinds(config, parse_cluster(settings["cluster"])),
            deterministic=config.deterministic,
        ),
        feed=training_feed(config, dataset),
        held_out=validation,
    )


def _terms(start: Start, dataset: Dataset, launcher: Launcher, shown: Display) -> Terms:
    config = start.config
    # who asks whether there is a plan asks for it next
    replan = lru_cache(maxsize=4)(partial(next_plan, config, start.model))

    precise = lru_cache(maxsize=4)(partial(precise_plan, config, start.model))
    storage, hashes = start.storage, dict(dataset.hashes)
    claim = replace(start.claim, lease=start.number, hashes=hashes)

    def identified(found: Sequence[PartialSnapshot]) -> RunIdentity:
        run = identify(claim, storage, found, shown.note)
        check_is_of_run(storage, kept_settings(config) | hashes, found)
        return run

    metrics = read_journal(config.run_dir / rundir.METRICS)

    def compile_(controller: Controller, cluster: Cluster, is_first: bool) -> None:
        of_run = config, start.model, precise, controller, cluster
        if is_first:
            compile_all(*of_run, shown.compiled)
        else:
            compile_again(*of_run)

    return Terms(
        settings=lambda cluster, plan: worker_settings(
            config, cluster_toml(cluster), precise(cluster, plan), dataset
        ),
        loss_scaling=LossScaling(
            config.loss_scale_init, config.loss_scale_growth_interval, precise
        ),
        standby_plans=StandbyPlans(
            replan,
            partial(Planning, config),
            # no compiling ahead beside the step that trains in this very process
            0.0 if config.launcher == EMBEDDED else config.foresee_after_s,
        ),
        checking=_checking(config, metrics),
        membership=Membership(start.hardware.cluster, config.cluster, launcher.present),
        compile=compile_,
        transport=config.transport,
        seed=config.seed,
        storage=storage,
        host={"run": settings_to_compare(config) | hashes},
        recovery=config.recovery,
        reroutes=config.reroute,
        heard_started=lambda workers: shown.note(
            f"workers ({config.launcher}): {', '.join(workers)}"
        ),
        identify=identified,
        check_begins=partial(
            check_begins,
            storage,
            start.saved,
            config.checkpoint.local is not None,
            _may_have_saved_on(start, metrics),
        ),
    )


def _may_have_saved_on(start: Start, metrics: Metrics) -> frozenset[str]:
    """Nodes on whose disks the run may have saved without telling.

    It tells of a checkpoint when it makes the next one.
    """
    kept, before = start.config.checkpoint, start.previous
    last = max((line["step"] for line in metrics), default=0)
    if before is None or kept.local is None or not 0 < kept.every <= last:
        return frozenset()
    return before.plan.nodes


def _checking(config: RunConfig, metrics: Metrics) -> StepChecking:
    """Checks of steps, with the losses of those that are done."""
    return StepChecking(
        SpikeRule(factor=config.spike_factor, window=config.spike_window),
        {line["step"] - 1: line["loss"] for line in metrics if "loss" in line},
        digest_every=config.digest_every,
        save_every=config.checkpoint.every,
        skips_spikes=config.on_spike == "skip",
    )


def precise_plan(config: RunConfig, model: Model, cluster: Cluster, plan: Plan) -> Plan:
    """The plan with what its stages compute in, and by which attention.

    Where CPUs stand in for the devices of the cluster they have none of its kernels.
    """
    plan = with_precisions(plan, cluster, config.dtype)
    if is_virtual(config):
        return without_kernels(plan, config.attention)
    precisions: dict[StageKey, Precision] = {
        (r, s): stage.precision for r, s, stage in plan.stages() if stage.precision
    }
    sizes = head_sizes(model)
    return with_attentions(plan, cluster, sizes, precisions, config.attention)
