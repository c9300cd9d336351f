# SPDX-License-Identifier: Apache-2.0
"""Chooses the cluster that a run uses, and the devices that stand for it.

Owns the order of preference among the user's cluster, the preset's and the discovered
one. Does not own which plan the run follows (`plan_choice.py`), the discovery
(`hetjax/cluster/discovery.py`) nor how devices are simulated
(`hetjax/mesh/process_setup.py`).
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Cluster
from hetjax.cluster.cluster_files import load_cluster
from hetjax.cluster.discovery import assign_devices, device_name
from hetjax.cluster.local_devices import (
    LocalDevice,
    as_reported,
    cluster_of_devices,
    is_one_kind,
)
from hetjax.cluster.memory_budget import GPU_ALLOCATOR_FRACTION
from hetjax.errors import BadInput
from hetjax.launchers.device_probe import accelerators_here, may_be_unlike
from hetjax.launchers.isolation import (
    gpu_share,
    memory_share,
    visible_devices,
    worker_environments,
)
from hetjax.launchers.launcher import remote_launcher_file
from hetjax.launchers.table import LAUNCHERS, LOCAL_PROCESSES
from hetjax.mesh.accelerators import (
    check_accelerator_usable,
    check_accelerator_used,
    start_jax,
)
from hetjax.mesh.process_setup import simulate_devices
from hetjax.profiling.found_apart import as_found_apart, run_here
from hetjax.profiling.found_here import as_found, cluster_here
from hetjax.training.settings.config import RunConfig, is_virtual
from hetjax.training.settings.presets import Preset

_MOST_SIMULATED = 4096  # devices
_HERE = "the devices that are here"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A cluster and the local devices of each of its nodes; users see its `source`.

    `discovered` says that the cluster was found, not read from a file. `here` are the
    accelerators of this machine that its worker processes may have.
    """

    cluster: Cluster
    devices: Mapping[str, Sequence[jax.Device]]
    source: str
    discovered: bool = False
    here: Sequence[LocalDevice] = ()


def choose_hardware(
    config: RunConfig, preset: Preset, given: Cluster | None = None
) -> Hardware:
    """Return the hardware of a run.

    That is the given cluster, else --cluster, else the preset's if there are only CPUs,
    else the devices here. May start JAX. Raises BadInput if devices are missing and may
    not be simulated; also if JAX does not use this machine's accelerator and --platform
    does not ask for the CPU.
    """
    if LAUNCHERS[config.launcher].has_worker_processes:
        return _of_workers(config, preset, given)
    if config.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    else:
        _check_share()
        os.environ.update(memory_share(os.environ))  # before JAX starts here
    asked = given or config.cluster
    cluster, simulate = _named(asked or preset.cluster), config.simulate
    if cluster is None:
        return _found(config)
    if simulate:
        if cluster.num_devices > _MOST_SIMULATED:
            raise BadInput(
                got=f"--simulate with {cluster.num_devices} devices",
                allowed=f"at most {_MOST_SIMULATED} simulated devices",
                fix="give a smaller --cluster, or leave --simulate out",
            )
        # a preset's cluster is for CPU-only machines: look for accelerators first
        with suppress(RuntimeError):  # JAX runs already: a notebook keeps its devices
            simulate_devices(cluster.num_devices, only_cpu=asked is not None)
    start_jax()
    if asked is None and not _on_cpu(config):
        return _found(config)
    devices = assign_devices(cluster, _local_devices(config, cluster), simulate)
    if not simulate:
        cluster = as_found(cluster, devices, cache_dir=config.data.cache_dir)
    return Hardware(cluster=cluster, devices=devices, source=_source(config, given))


def with_needed_launcher(config: RunConfig, given: Cluster | None = None) -> RunConfig:
    """Return the settings, with worker processes if one process is not enough.

    A process can have GPUs of only one kind. If the run uses one kind of those that are
    here, hide the others from this process. Must be called before JAX starts.
    """
    if LAUNCHERS[config.launcher].has_worker_processes or is_virtual(config):
        return config
    here, cluster = _unlike_gpus(), _named(given or config.cluster)
    wanted = [d for d in here if cluster is None or _is_of(cluster, d)]
    if not is_one_kind(wanted):
        return replace(config, launcher=LOCAL_PROCESSES)
    os.environ.update(visible_devices(wanted, here) if wanted else {})
    return config


def _is_of(cluster: Cluster, device: LocalDevice) -> bool:
    return device_name(device) in {canonical_name(n.device) for n in cluster.nodes}


def has_room(config: RunConfig, preset: Preset, given: Cluster | None = None) -> bool:
    """Return whether this process can simulate the run's cluster, if it has to.

    It cannot if JAX already runs with fewer CPU devices, as in many notebooks.
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


def cluster_of(given: Cluster | str | Path | None) -> Cluster:
    """Return the given cluster, or that of the given file, else that found here."""
    if isinstance(given, Cluster):
        return given
    if given is not None:
        return load_cluster(given)
    unlike = _unlike_gpus()
    return cluster_of_devices(unlike) if unlike else cluster_here(start_jax())[0]


def _unlike_gpus() -> Sequence[LocalDevice]:
    """Return the accelerators here if they are of several kinds; do not start JAX."""
    here = accelerators_here(os.environ) if may_be_unlike() else ()
    return () if is_one_kind(here) else here


def _named(given: Cluster | Path | None) -> Cluster | None:
    return load_cluster(given) if isinstance(given, Path) else given


def _source(config: RunConfig, given: Cluster | None) -> str:
    """Return the source, as users see it, of a cluster that was not discovered."""
    if given is not None:
        return "given"
    return f"file {config.cluster}" if config.cluster else "the preset's"


def _of_workers(config: RunConfig, preset: Preset, given: Cluster | None) -> Hardware:
    """Return the cluster of a file, of the launcher's machines, or of this machine."""
    if not LAUNCHERS[config.launcher].workers_are_here:
        return _of_remote_workers(config, preset, given)
    here = () if is_virtual(config) else accelerators_here(os.environ)
    asked = given or config.cluster or (None if here else preset.cluster)
    cluster = _named(asked) or (cluster_of_devices(here) if here else None)
    if cluster is None:
        raise BadInput(
            got=f"--launcher {config.launcher} without a cluster",
            allowed="a cluster file that says which node has a worker",
            fix="add --cluster FILE, or leave --launcher out",
        )
    if _wants_accelerators(config, cluster):
        check_accelerator_usable()  # workers check again, but only once they run
        cluster = as_reported(cluster, here) if asked else cluster
        run = run_here(worker_environments(cluster, here, os.environ))
        cluster = as_found_apart(cluster, run, config.data.cache_dir)
        _check_share()
    jax.config.update("jax_platforms", "cpu")  # accelerators are for the workers
    source = _source(config, given) if asked else _HERE
    return Hardware(cluster=cluster, devices={}, source=source, here=here)


def _of_remote_workers(
    config: RunConfig, preset: Preset, given: Cluster | None
) -> Hardware:
    """Return a file's cluster, or the one that the launcher finds.

    Workers will check which of the file's devices exist.
    """
    asked = given or config.cluster or (preset.cluster if config.simulate else None)
    jax.config.update("jax_platforms", "cpu")  # accelerators are for the workers
    named = _named(asked)
    launcher = remote_launcher_file(config.launcher)
    cluster = named or launcher.find_cluster(config.hosts)
    if not is_virtual(config):
        run = launcher.run_on_nodes(cluster, config.hosts)
        cluster = as_found_apart(cluster, run, config.data.cache_dir)
    source = _source(config, given) if named else LAUNCHERS[config.launcher].finder
    return Hardware(
        cluster=cluster, devices={}, source=source, discovered=named is None
    )


def share_of_gpus(config: RunConfig, cluster: Cluster) -> float | None:
    """Return the share of each GPU's memory that JAX takes; None without GPUs."""
    kinds = {canonical_name(node.device) for node in cluster.nodes}
    has_gpus = any(kind != "cpu" and not kind.startswith("TPU") for kind in kinds)
    return gpu_share(os.environ) if has_gpus and not is_virtual(config) else None


def _check_share() -> None:
    """Warn if JAX is set to take less of a GPU's memory than plans count on."""
    share = gpu_share(os.environ)
    if share < GPU_ALLOCATOR_FRACTION:
        warnings.warn(
            f"JAX is set to take {share:g} of a GPU's memory, but plans count on "
            f"{GPU_ALLOCATOR_FRACTION:g}: a plan that fills a device will not start; "
            "unset XLA_PYTHON_CLIENT_MEM_FRACTION, or give nodes less memory_gib",
            stacklevel=2,
        )


def _found(config: RunConfig) -> Hardware:
    start_jax()
    if config.simulate and _on_cpu(config):
        raise BadInput(
            got="--simulate without a cluster",
            allowed="--simulate with a cluster file that says what to simulate",
            fix="add --cluster FILE, or leave --simulate out",
        )
    cluster, devices = cluster_here(_used_devices(config), config.data.cache_dir)
    return Hardware(cluster=cluster, devices=devices, source=_HERE)


def _on_cpu(config: RunConfig) -> bool:
    """Return whether the run has only the CPU; starts JAX."""
    return config.platform == "cpu" or jax.default_backend() == "cpu"


def _local_devices(config: RunConfig, cluster: Cluster) -> list[jax.Device]:
    """Return the local devices that nodes of a given cluster can have."""
    if not _wants_accelerators(config, cluster):
        return jax.local_devices(backend="cpu")
    here = _used_devices(config)
    if any(node.device == "cpu" for node in cluster.nodes):
        cpus = jax.local_devices(backend="cpu")
        here = [*(d for d in here if d.platform != "cpu"), *cpus]
    return here


def _wants_accelerators(config: RunConfig, cluster: Cluster) -> bool:
    """Return whether some node needs a device other than a CPU."""
    if is_virtual(config):
        return False
    return any(node.device != "cpu" for node in cluster.nodes)


def on_cpus(config: RunConfig, cluster: Cluster) -> bool:
    """Return whether some node trains on the CPUs that its host compiles on."""
    kinds = {canonical_name(node.device) for node in cluster.nodes}
    return is_virtual(config) or "cpu" in kinds


def _used_devices(config: RunConfig) -> list[jax.Device]:
    """Return JAX's default devices. Raises BadInput if they omit an accelerator."""
    if config.platform == "cpu":
        return jax.local_devices(backend="cpu")
    check_accelerator_used()
    return jax.local_devices()
