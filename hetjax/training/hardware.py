# SPDX-License-Identifier: Apache-2.0
"""Which cluster a run uses, and which devices stand for it.

Owns the order of preference among what the user gave, what the preset brings and what
is found. Does not own which plan the run follows (`placement.py`), what is found
(`hetjax/cluster/discovery.py`) nor how devices are simulated
(`hetjax/mesh/process_setup.py`).
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jax

from hetjax.cluster.cluster import Cluster
from hetjax.cluster.cluster_files import load_cluster
from hetjax.cluster.discovery import assign_devices
from hetjax.errors import BadInput
from hetjax.launch.on_ray import ray_cluster
from hetjax.mesh.accelerators import (
    check_accelerator_usable,
    check_accelerator_used,
    start_jax,
)
from hetjax.mesh.process_setup import simulate_devices
from hetjax.profiling.found_here import as_found, cluster_here
from hetjax.training.config import RunConfig
from hetjax.training.presets import Preset

_MOST_SIMULATED = 4096  # devices


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A cluster and the local devices of each of its nodes; `source` is for people.

    `discovered`: it is what was found, not what a file says.
    """

    cluster: Cluster
    devices: Mapping[str, Sequence[jax.Device]]
    source: str
    discovered: bool = False


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
    devices = assign_devices(cluster, _local_devices(config, cluster), simulate)
    if not simulate:
        cluster = as_found(cluster, devices, cache_dir=config.data.cache_dir)
    return Hardware(cluster=cluster, devices=devices, source=_source(config, given))


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


def cluster_of(given: Cluster | str | Path | None) -> Cluster:
    """Return it, or that of the file, else the one of the devices that are here."""
    if isinstance(given, Cluster):
        return given
    if given is not None:
        return load_cluster(given)
    return cluster_here(start_jax())[0]


def _named(given: Cluster | Path | None) -> Cluster | None:
    return load_cluster(given) if isinstance(given, Path) else given


def _source(config: RunConfig, given: Cluster | None) -> str:
    """Where a cluster comes from that is not what was found, for people."""
    if given is not None:
        return "given"
    return f"file {config.cluster}" if config.cluster else "the preset's"


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
    cluster, devices = cluster_here(_used_devices(config), config.data.cache_dir)
    source = "the devices that are here"
    return Hardware(cluster=cluster, devices=devices, source=source)


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
