# SPDX-License-Identifier: Apache-2.0
"""Settles a start of a run, before anything is written, into one frozen value.

Owns the order in which the run directory, its checkpoints, the devices and the plan are
examined: every mistake of a user is found before anything is written. Does not own the
parts (`directory/`, `layout/`) nor what is built from them (`driver_setup.py`).
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetjax.checkpoint.run_identity import RunIdentity
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.cluster.cluster import Cluster
from hetjax.data.batches import packing
from hetjax.data.dataset import Dataset
from hetjax.errors import listed
from hetjax.launchers.table import LAUNCHERS
from hetjax.models.model import Model, parameter_count
from hetjax.planner.model.seating import idle_devices
from hetjax.plans.plan import Plan
from hetjax.report.certainty import calibration_line
from hetjax.report.progress import Display
from hetjax.training.directory import rundir
from hetjax.training.directory.frozen_base import base_hashes, check_base
from hetjax.training.directory.identity import Claim, provisional
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.leases import Leases
from hetjax.training.directory.leftover_checkpoints import claim_of
from hetjax.training.directory.progress import (
    checkpoint_storage,
    identified_here,
    read_progress,
)
from hetjax.training.directory.rundir import Previous
from hetjax.training.launchers import check_launcher
from hetjax.training.layout.hardware import Hardware, choose_hardware, share_of_gpus
from hetjax.training.layout.plan_choice import (
    Choice,
    choose_plan,
    read_run_calibration,
)
from hetjax.training.run_data import check_tokenizer, with_packing
from hetjax.training.run_model import (
    warn_of_missing_rank,
    warn_of_other_model,
    warn_of_random_base,
)
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.presets import Preset
from hetjax.training.worker import first_weights

_NAMED = 8  # idle nodes that a start names


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a start has settled: the run's settings, devices, plan and progress."""

    config: RunConfig
    model: Model
    hardware: Hardware
    choice: Choice
    previous: Previous | None
    claim: Claim
    saved: int | None
    is_done: bool
    base: Mapping[str, str]  # the digest of frozen weights, if there are any
    leases: Leases | None = None  # taken before the start writes anything

    def hashes(self, dataset: Dataset) -> dict[str, str]:
        """Return the hashes of what the run reads: text, tokenizer, frozen weights."""
        return {**dataset.hashes, **self.base}

    def check_leases(self) -> None:
        """Raise LeaseLost if the run may no longer write."""
        if self.leases is not None:
            self.leases.check()

    @property
    def number(self) -> int:
        """The number of this start, which grows with each start of the run."""
        return 0 if self.leases is None else self.leases.start

    @property
    def storage(self) -> CheckpointStorage:
        """Where checkpoints go, under the leases."""
        storage = checkpoint_storage(self.config, self.run)
        if self.leases is None:
            return storage
        row = LAUNCHERS[self.config.launcher]
        return self.leases.protecting(storage, is_far=not row.workers_are_here)

    @property
    def run(self) -> RunIdentity:
        """The run's identity, as far as it is known before workers report saves."""
        return provisional(self.claim)


def settle(
    config: RunConfig,
    preset: Preset,
    model: Model,
    shown: Display,
    *,
    cluster: Cluster | None = None,
    plan: Plan | None = None,
) -> Start:
    """Determine from which state, where and by which plan the run resumes.

    `cluster` and `plan` take precedence over those of files and of the preset. Raises
    BadInput and NoFeasiblePlan; writes nothing.
    """
    previous = rundir.read_previous(config.run_dir)
    if previous is not None:
        rundir.check_same_run(previous, config)
    base = base_hashes(config)
    if previous is not None:
        check_base(previous.base, base, config)
    config = with_packing(config, model, previous)
    for name in (rundir.METRICS, rundir.EVENTS):
        read_journal(config.run_dir / name)  # a damaged one is refused
    claim = identified_here(config, claim_of(config, previous), shown)
    saved, is_done = read_progress(config, provisional(claim), shown)
    config = _with_first_init(config, previous, saved)
    if saved is None:
        first_weights(config, model)  # refuses weights that cannot be read
        warn_of_other_model(config)
        warn_of_random_base(config)
        warn_of_missing_rank(config)
    check_tokenizer(config, model, previous)  # before a plan, which may take minutes
    if not is_done:
        check_launcher(config)
    shown.doing("looking for devices")
    hardware = choose_hardware(config, preset, cluster)
    choice = choose_plan(
        config, model, hardware.cluster, preset, previous, shown.doing, given=plan
    )
    return Start(
        config=config,
        model=model,
        hardware=hardware,
        choice=choice,
        previous=previous,
        claim=claim,
        base=base,
        saved=saved,
        is_done=is_done,
    )


def with_other_plan(start: Start, preset: Preset, shown: Display) -> Start:
    """Return the start with another plan, after the compiler refused the planner's."""
    choice = choose_plan(
        start.config,
        start.model,
        start.hardware.cluster,
        preset,
        start.previous,
        shown.doing,
    )
    return replace(start, choice=choice)


def describe(start: Start, dataset: Dataset, shown: Display) -> None:
    """Show what a start has settled: model, text, cluster and plan."""
    model, cluster = start.model, start.hardware.cluster
    held, trained = (
        sum(parameter_count(layer, trained=part) for layer in model.layers)
        for part in (False, True)
    )
    part = "" if trained == held else f", of which {_as_text(trained)} are trained"
    nodes = ", ".join(f"{n.name} {n.count} x {n.device}" for n in cluster.nodes)
    here = start.hardware.devices.values()
    on = ", ".join({d.platform for devices in here for d in devices}) or "workers"
    shown.note(f"model: {model.name}, {_as_text(held)} parameters{part}")
    shown.note(
        f"data: {dataset.num_tokens:,} tokens, {dataset.bytes_per_token:.2f} bytes "
        f"per token, {dataset.directory}"
    )
    if start.config.data.pack:
        shown.note(f"packing: {packing(dataset.trains, start.config.seq_len)}")
    shown.note(f"cluster ({start.hardware.source}): {nodes}; on {on}")
    if share := share_of_gpus(start.config, cluster):
        shown.note(f"memory: JAX takes {share:.0%} of each GPU's when it starts")
    shown.note(f"plan ({start.choice.source}):\n{start.choice.plan}")
    if idle := idle_devices(start.choice.plan, cluster):
        shown.note(f"not used by this plan: {_idle_as_text(idle, cluster)}")
    if start.choice.is_searched:
        seen = read_run_calibration(start.config, cluster)
        if seen.observations:
            shown.note(calibration_line(seen))


def _with_first_init(
    config: RunConfig, previous: Previous | None, saved: int | None
) -> RunConfig:
    """Return the settings with the `init` that the run began with, if it has saved its
    weights; warn if another one was given."""
    if previous is None or saved is None or config.init == previous.config.init:
        return config
    if config.init is not None:
        warnings.warn(
            f"--init {config.init} has no effect: the run in {config.run_dir} goes "
            f"on with the weights of its step {saved}",
            stacklevel=3,
        )
    return replace(config, init=previous.config.init)


def _idle_as_text(idle: Mapping[str, tuple[int, ...]], cluster: Cluster) -> str:
    """Return idle devices as text: a node's name, or how many of its devices, if
    others have work. Of many nodes the first are named."""
    named = [
        node
        if len(devices) == (count := cluster.node(node).count)
        else f"{len(devices)} of {count} devices of {node}"
        for node, devices in idle.items()
    ]
    return listed(named, _NAMED)


def _as_text(parameters: int) -> str:
    """Return a number of parameters in millions, a small one in full."""
    return f"{parameters / 1e6:,.1f} M" if parameters >= 100_000 else f"{parameters:,}"
