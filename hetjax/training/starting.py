# SPDX-License-Identifier: Apache-2.0
"""From what a start has settled to a run that has its state and can take steps.

Owns which driver that is, and what workers are told. Does not own what is settled, nor
what a start writes (`run.py`).
"""

from contextlib import ExitStack
from dataclasses import dataclass

from hetjax.checkpoint.restore import Checkpoint
from hetjax.checkpoint.save import Keeping
from hetjax.cluster.files import cluster_toml
from hetjax.data.dataset import Dataset
from hetjax.models.model import Model
from hetjax.runtime.embedded import Embedded
from hetjax.training import rundir
from hetjax.training.config import RunConfig
from hetjax.training.driving import Driver, LocalDriver
from hetjax.training.elastic import FleetDriver, Terms
from hetjax.training.feed import held_out, training_feed
from hetjax.training.launching import LOGS, Launcher, OnThisMachine, started
from hetjax.training.membership import Membership
from hetjax.training.on_ray import OnRay
from hetjax.training.optimizer import optimizer
from hetjax.training.placement import Choice, Hardware, next_plan
from hetjax.training.progress import Display
from hetjax.training.rundir import Previous
from hetjax.training.worker import worker_settings

_WORKER = "embedded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a start has settled before it writes anything."""

    config: RunConfig
    model: Model
    hardware: Hardware
    choice: Choice
    dataset: Dataset
    previous: Previous | None
    checkpoint: Checkpoint | None

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step


def driver_of(start: Start, shown: Display) -> Driver:
    """Compile the plan's programs and fill in the state to start from."""
    make = _local if start.config.launcher == "embedded" else _fleet
    driver = make(start, shown)
    if start.checkpoint is not None:
        shown.note(f"resumed at step {start.step} from {start.checkpoint.path}")
    return driver


def _local(start: Start, shown: Display) -> LocalDriver:
    config = start.config
    feed = training_feed(config, start.dataset)
    validation = held_out(config, start.dataset)
    runtime = Embedded(
        start.choice.plan,
        start.model,
        start.hardware.devices,
        optimizer(config.optimizer, config.steps),
        dtype=config.dtype,
        clip_norm=config.optimizer.clip_norm,
    )
    if start.checkpoint is not None:
        start.checkpoint.check_same_model(runtime.abstract_entries())
    runtime.compile(shown.compiled)
    if start.checkpoint is None:
        runtime.initialise(config.seed)
    else:
        runtime.restore(start.checkpoint.read)
    return LocalDriver(
        runtime,
        feed,
        validation,
        keeping(config).saver(_WORKER),
        _host(config),
    )


def _fleet(start: Start, shown: Display) -> FleetDriver:
    config, plan, cluster = start.config, start.choice.plan, start.hardware.cluster
    num_validation = len(held_out(config, start.dataset))
    terms = Terms(
        settings=lambda cluster, plan: worker_settings(
            config, cluster_toml(cluster), plan, start.dataset
        ),
        replan=lambda cluster, current: next_plan(
            config, start.model, cluster, current
        ),
        membership=Membership(cluster, config.cluster),
        transport=config.transport,
        seed=config.seed,
        keeping=keeping(config),
        host=_host(config),
        recovery=config.recovery,
    )
    with ExitStack() as stack:
        launcher = _launcher(start, stack)
        fleet = started(launcher, plan, cluster.nodes)
        shown.note(f"workers ({config.launcher}): {', '.join(fleet.workers)}")
        fleet.build(terms.settings(cluster, plan))
        fleet.connect(terms.transport)
        fleet.compile(shown.compiled)
        if start.checkpoint is None:
            fleet.initialise(terms.seed)
        else:
            fleet.restore(terms.keeping.directory, start.step)
        return FleetDriver(
            fleet,
            launcher,
            stack.pop_all(),
            terms,
            cluster=cluster,
            at=start.step,
            num_validation=num_validation,
        )


def _launcher(start: Start, stack: ExitStack) -> Launcher:
    config, cluster = start.config, start.hardware.cluster
    if config.launcher == "ray":
        return OnRay(cluster, stack, simulate=config.simulate)
    return OnThisMachine(config.run_dir / LOGS, stack)


def keeping(config: RunConfig) -> Keeping:
    """Where the run's checkpoints go."""
    return Keeping(
        directory=(config.run_dir / rundir.CHECKPOINTS).absolute(),
        keep=config.checkpoint.keep,
        cloud=config.checkpoint.cloud,
        upload_mbit_per_s=config.checkpoint.upload_mbit_per_s,
    )


def _host(config: RunConfig) -> dict[str, int]:
    """What a checkpoint says besides its state."""
    return {"seed": config.seed, "global_batch": config.global_batch}
