# SPDX-License-Identifier: Apache-2.0
"""Which cluster a run uses, which devices stand for it, and which plan it follows.

Owns the order of preference among what the user gave, what the run directory holds,
what the preset brings, and what is found or planned. Does not own plans themselves
(`hetjax/plans/`) nor how devices are simulated (`hetjax/mesh/process_setup.py`).
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jax

from hetjax.cluster.cluster import Cluster
from hetjax.cluster.cluster_files import load_cluster
from hetjax.cluster.discovery import assign_devices, discover
from hetjax.cluster.user_files import placed
from hetjax.costs.measured.layer_profile import Profile, check_profile, read_profile
from hetjax.errors import BadInput
from hetjax.launch.on_ray import ray_cluster
from hetjax.mesh.accelerators import (
    check_accelerator_usable,
    check_accelerator_used,
    start_jax,
)
from hetjax.mesh.process_setup import simulate_devices
from hetjax.models.model import Model, tensor_sizes
from hetjax.planner.model.costing import (
    all_kinds,
    check_plan_fits,
    compute_dtype,
    known_degrees,
)
from hetjax.planner.model.request import PlanRequest
from hetjax.plans.even import even_plan
from hetjax.plans.plan import Plan
from hetjax.plans.plan_files import read_plan
from hetjax.plans.validation import validate_plan
from hetjax.report.prediction import certificate, found_plan
from hetjax.stage.arrays import OptimizerInit
from hetjax.training.config import RunConfig, option
from hetjax.training.optimizer import optimizer
from hetjax.training.presets import Preset
from hetjax.training.rundir import PROFILE, Previous

_MOST_SIMULATED = 4096  # devices
_SIZES = (1, 2, 4, 8)  # of microbatches and tensor stages, tried in any case


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A cluster and the local devices of each of its nodes; `source` is for people.

    `discovered`: it is what was found, not what a file says.
    """

    cluster: Cluster
    devices: Mapping[str, Sequence[jax.Device]]
    source: str
    discovered: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A valid plan; `source` says for people where it comes from."""

    plan: Plan
    source: str


def choose_hardware(
    config: RunConfig, preset: Preset, given: Cluster | None = None
) -> Hardware:
    """Take the one given, else --cluster, else the preset's where there are only CPUs,
    else what is here.

    May start JAX. BadInput if devices are missing and may not be simulated, also where
    JAX does not use this machine's accelerator and --platform does not ask for the CPU.
    """
    if config.launcher != "embedded":
        return _of_workers(config, preset, given)
    if config.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    asked = given or config.cluster
    cluster, simulate = _named(asked or preset.cluster), config.simulate
    if cluster is None:
        return _found(config)
    if simulate:
        if cluster.num_devices > _MOST_SIMULATED:
            raise BadInput(
                got=f"--simulate of {cluster.num_devices} devices",
                allowed=f"at most {_MOST_SIMULATED} simulated devices",
                fix="give a smaller --cluster, or leave --simulate out",
            )
        # a preset's cluster is for CPU-only machines: look for accelerators first
        with suppress(RuntimeError):  # JAX runs already: a notebook keeps its devices
            simulate_devices(cluster.num_devices, only_cpu=asked is not None)
    start_jax()
    if asked is None and not _on_cpu(config):
        return _found(config)
    return Hardware(
        cluster=cluster,
        devices=assign_devices(cluster, _local_devices(config, cluster), simulate),
        source=_source(config, given),
    )


def has_room(config: RunConfig, preset: Preset, given: Cluster | None = None) -> bool:
    """Whether this process can simulate the run's cluster, if it is to.

    It cannot where JAX runs already with fewer CPU devices, as in many a notebook.
    """
    asked = given or config.cluster
    cluster = _named(asked or preset.cluster)
    if cluster is None or not config.simulate:
        return True
    try:
        simulate_devices(cluster.num_devices, only_cpu=asked is not None)
    except RuntimeError:
        return len(jax.local_devices(backend="cpu")) >= cluster.num_devices
    return True


def _named(given: Cluster | Path | None) -> Cluster | None:
    return load_cluster(given) if isinstance(given, Path) else given


def _source(config: RunConfig, given: Cluster | None) -> str:
    """Where a cluster comes from that is not what was found, for people."""
    if given is not None:
        return "given"
    return f"file {config.cluster}" if config.cluster else "the preset's"


def choose_plan(
    config: RunConfig,
    model: Model,
    cluster: Cluster,
    preset: Preset,
    previous: Previous | None,
    progress: Callable[[str], None] = lambda line: None,
    *,
    given: Plan | None = None,
) -> Choice:
    """Take the one given, else --plan, else the run's for the same cluster, else the
    preset's, else plan.

    `progress` is told how planning goes. BadInput if the plan does not fit the cluster,
    the model or the settings, NoFeasiblePlan if it does not fit into memory.
    """
    choice = (
        _given(config, given)
        or _of_run(config, cluster, previous)
        or _of_preset(config, cluster, preset)
    )
    if choice is None and config.planner == "hetjax":
        progress(f"planning for {cluster.num_devices} devices")
        choice = _searched(config, model, cluster)
    choice = choice or _even(config, model, cluster)
    check_plan(choice.plan, model, cluster, f"plan ({choice.source})")
    check_plan_fits(
        choice.plan,
        model,
        cluster,
        dtype=config.dtype,
        optimizer=optimizer_init(config),
    )
    return choice


def cluster_of(given: Cluster | str | Path | None) -> Cluster:
    """Return it, or that of the file, else the one of the devices that are here."""
    if isinstance(given, Cluster):
        return given
    return discover(start_jax()) if given is None else load_cluster(given)


def check_plan(plan: Plan, model: Model, cluster: Cluster, where: str) -> None:
    """Raise BadInput, beginning with `where`, unless the plan fits both."""
    with placed(where):
        validate_plan(
            plan, cluster, len(model.layers), tensor_sizes(model), model.max_seq_len
        )


def _of_workers(config: RunConfig, preset: Preset, given: Cluster | None) -> Hardware:
    """The cluster of a file, or Ray's; what is there, its workers will see."""
    asked = given or config.cluster
    if asked is None and (config.simulate or config.launcher == "processes"):
        asked = preset.cluster
    cluster = _named(asked)
    if cluster is None and config.launcher == "processes":
        raise BadInput(
            got=f"--launcher {config.launcher} without a cluster",
            allowed="a cluster file that says which node has a worker",
            fix="add --cluster FILE, or leave --launcher out",
        )
    if (
        cluster
        and config.launcher == "processes"
        and _wants_accelerators(config, cluster)
    ):
        check_accelerator_usable()  # workers look again, but only when they are there
    jax.config.update("jax_platforms", "cpu")  # accelerators are for the workers
    if cluster is None:
        found = ray_cluster()
        return Hardware(cluster=found, devices={}, source="Ray's", discovered=True)
    return Hardware(cluster=cluster, devices={}, source=_source(config, given))


def _found(config: RunConfig) -> Hardware:
    start_jax()
    if config.simulate and _on_cpu(config):
        raise BadInput(
            got="--simulate without a cluster",
            allowed="--simulate with a cluster file that says what to simulate",
            fix="add --cluster FILE, or leave --simulate out",
        )
    here = _used_devices(config)
    cluster = discover(here)
    return Hardware(
        cluster=cluster,
        devices=assign_devices(cluster, here, simulate=False),
        source="the devices that are here",
    )


def _on_cpu(config: RunConfig) -> bool:
    """Whether the run has no more than the CPU; starts JAX."""
    return config.platform == "cpu" or jax.default_backend() == "cpu"


def _local_devices(config: RunConfig, cluster: Cluster) -> list[jax.Device]:
    """What the nodes of a cluster that is not what was found can have."""
    if not _wants_accelerators(config, cluster):
        return jax.local_devices(backend="cpu")
    here = _used_devices(config)
    if any(node.device == "cpu" for node in cluster.nodes):
        cpus = jax.local_devices(backend="cpu")
        here = [*(d for d in here if d.platform != "cpu"), *cpus]
    return here


def _wants_accelerators(config: RunConfig, cluster: Cluster) -> bool:
    """Whether some node is to have another device than a CPU."""
    if config.simulate or config.platform == "cpu":
        return False
    return any(node.device != "cpu" for node in cluster.nodes)


def _used_devices(config: RunConfig) -> list[jax.Device]:
    """What JAX runs on by itself; BadInput if an accelerator is left out."""
    if config.platform == "cpu":
        return jax.local_devices(backend="cpu")
    check_accelerator_used()
    return jax.local_devices()


def _given(config: RunConfig, given: Plan | None) -> Choice | None:
    if given is not None:
        plan, what, source = given, "the given plan", "given"
    elif config.plan is not None:
        plan, source = read_plan(config.plan), f"file {config.plan}"
        what = f"plan file {str(config.plan)!r}"
    else:
        return None
    for name, in_plan, in_config in _shared(plan, config):
        if in_plan != in_config:
            raise BadInput(
                got=f"{what}: {name} = {in_plan!r}, and the run's {name} is "
                f"{in_config!r}",
                allowed=f"the same {name} in both",
                fix=f"add {option(name)} {in_plan}, or correct the plan file",
            )
    return Choice(plan=plan, source=source)


def _of_run(
    config: RunConfig, cluster: Cluster, previous: Previous | None
) -> Choice | None:
    if previous is None or not _same_machines(previous.cluster, cluster):
        return None
    if _how(config) != _how(previous.config):
        return None  # asked to plan anew
    return Choice(plan=previous.plan, source="the run directory's")


def _of_preset(config: RunConfig, cluster: Cluster, preset: Preset) -> Choice | None:
    if preset.plan is None or preset.cluster is None:
        return None
    is_otherwise = _how(config) != _how(preset.config)  # asked to plan so
    if is_otherwise or not _same_machines(load_cluster(preset.cluster), cluster):
        return None
    plan = read_plan(preset.plan)
    if any(in_plan != in_config for _, in_plan, in_config in _shared(plan, config)):
        return None
    return Choice(plan=plan, source="the preset's")


def _even(config: RunConfig, model: Model, cluster: Cluster) -> Choice:
    plan = even_plan(
        cluster,
        model=model.name,
        num_layers=len(model.layers),
        seq_len=config.seq_len,
        global_batch=config.global_batch,
        microbatch_size=config.microbatch_size,
        tensor_sizes=tensor_sizes(model),
    )
    return Choice(plan=plan, source="planner 'even'")


def next_plan(config: RunConfig, model: Model, cluster: Cluster, current: Plan) -> Plan:
    """Plan for a cluster that has changed: quickly, and counting what has to move.

    NoFeasiblePlan if the model does not fit there.
    """
    if config.planner == "even":
        plan = _even(config, model, cluster).plan
        check_plan_fits(
            plan, model, cluster, dtype=config.dtype, optimizer=optimizer_init(config)
        )
        return plan
    from hetjax.planner.search.replan import replan  # as in `_searched`

    return replan(_request(config, model, cluster), current).best.plan


def _searched(config: RunConfig, model: Model, cluster: Cluster) -> Choice:
    """Plan without local search: that stops by the clock, and runs are repeatable."""
    # a run that has its plan need not wait for the solvers: to import them takes longer
    # than to import JAX
    from hetjax.planner.search.find import find_plan

    try:
        found = find_plan(_request(config, model, cluster), local_search_s=0.0)
    except BadInput as bad:  # of a device that nobody describes, say
        fix = f"{bad.fix}; or give --planner even, which needs no figures"
        raise BadInput(got=bad.got, allowed=bad.allowed, fix=fix) from bad
    return Choice(
        plan=found_plan(found), source=f"planner 'hetjax', {certificate(found)}"
    )


def _request(config: RunConfig, model: Model, cluster: Cluster) -> PlanRequest:
    profile, _ = read_run_profile(config, model)
    if profile is not None and not profile.devices & all_kinds(cluster):
        known = ", ".join(sorted(profile.devices)) or "no devices"
        warnings.warn(
            f"the profile is of {known}: all times of this cluster are estimates",
            stacklevel=2,
        )
    return PlanRequest(
        model=model,
        cluster=cluster,
        seq_len=config.seq_len,
        global_batch=config.global_batch,
        dtype=config.dtype,
        optimizer=optimizer_init(config),
        profile=profile,
        microbatch_sizes=tuple(sorted({*_SIZES, config.microbatch_size})),
        tensor_degrees=known_degrees(_SIZES, cluster, profile),
    )


def read_run_profile(
    config: RunConfig, model: Model
) -> tuple[Profile, Path] | tuple[None, None]:
    """Return --profile, else the run directory's, if there is one; and its path."""
    path = config.profile or config.run_dir / PROFILE
    if config.profile is None and not path.exists():
        return None, None
    profile = read_profile(path)
    with placed(f"profile file {str(path)!r}"):
        check_profile(profile, model.name, config.seq_len, len(model.layers))
        compute_dtype(config.dtype, profile, config.dtype)
    return profile, path


def optimizer_init(config: RunConfig) -> OptimizerInit:
    """Return the function that makes the state of the run's optimizer."""
    return optimizer(config.optimizer, config.steps).init


def _how(config: RunConfig) -> tuple[str, int, Path | None]:
    """What the planner is told; another value than before asks for its plan."""
    return config.planner, config.microbatch_size, config.profile


def _shared(plan: Plan, config: RunConfig) -> list[tuple[str, object, object]]:
    names = ("model", "seq_len", "global_batch")
    return [(name, getattr(plan, name), getattr(config, name)) for name in names]


def _same_machines(one: Cluster, other: Cluster) -> bool:
    return (one.nodes, one.links) == (other.nodes, other.links)
