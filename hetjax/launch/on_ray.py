# SPDX-License-Identifier: Apache-2.0
"""Workers on the machines of a Ray cluster, an actor each.

Owns placing, starting and watching them, and which machines are there; Ray gathers what
they print. Nothing of a step passes through Ray: controller and workers talk over links
of their own, and no object of ours is pickled but a few words of text. Does not own
which machine is which node (`hetjax/cluster/ray_nodes.py`), nor what a worker does
(`hetjax/training/worker.py`).
"""

import os
import pkgutil
import socket
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import compress
from typing import Any

from hetjax.cluster.cluster import Cluster, part_of
from hetjax.cluster.ray_nodes import (
    RayNode,
    cluster_of_ray,
    matched,
    on_ray_nodes,
    ray_nodes,
)
from hetjax.errors import BadInput
from hetjax.launch.launching import Bootstraps
from hetjax.mesh.process_setup import malloc_environment
from hetjax.runtime.worker.service import read_bootstrap

_ENTRY = "hetjax.training.worker:serve_run"  # of a room above: by name
_LOOK_S = 0.5
_MACHINES_S = 5.0  # Ray is asked for its machines no more often while all goes well
_ANSWER_S = 1.0  # of a machine that is there; Ray itself takes far longer to give it up
# what a worker must know before JAX starts there
_PASSED = ("XLA_FLAGS", "JAX_PLATFORMS", "PJRT_NPROC", "PYTHONPATH")


def ray_cluster() -> Cluster:
    """Return the cluster that Ray's machines make; joins or starts Ray."""
    return cluster_of_ray(_machines())


class OnRay:
    """An actor for each worker, on the machine of its node; `stack` ends them all.

    A cluster that is `discovered` takes in whatever machines Ray gets.
    """

    def __init__(
        self,
        cluster: Cluster,
        stack: ExitStack,
        *,
        simulate: bool,
        discovered: bool,
        patience: float,
    ) -> None:
        """BadInput if a node has no machine, or too few."""
        self._cluster, self._simulate, self._stack = cluster, simulate, stack
        self._discovered = discovered
        self._machines = on_ray_nodes(cluster, _machines(), simulate)
        self._looked_s = time.monotonic()
        self._bootstraps = Bootstraps(
            _ray().util.get_node_ip_address(), stack, patience
        )
        self.connections = self._bootstraps.connections
        self._actors: dict[str, Any] = {}
        self._running: dict[str, Any] = {}
        self._ended = threading.Event()
        stack.callback(self._ended.set)

    def start(self, workers: Sequence[str]) -> None:
        ray = _ray()
        for worker in workers:
            if earlier := self._actors.pop(worker, None):
                self._running.pop(worker)
                ray.kill(earlier)
            machine = self._machines[worker]
            actor = _actor(worker, self._cluster, machine, self._simulate)
            self._stack.callback(ray.kill, actor)
            self._actors[worker] = actor
            bootstrap = self._bootstraps.of(worker, machine.address).text()
            self._running[worker] = actor.work.remote(bootstrap)
        running = {self._running[worker]: worker for worker in workers}
        threading.Thread(target=self._watch, args=(running,), daemon=True).start()
        self.connections.wait_for(workers)

    @property
    def pids(self) -> Mapping[str, int]:
        """None: they are Ray's, and `ray list actors` tells them and where they are."""
        return {}

    def present(self, cluster: Cluster, again: bool) -> Cluster:
        """The nodes that have machines now; if none has, they stay who they were."""
        if again or time.monotonic() - self._looked_s >= _MACHINES_S:
            self._look(cluster, _answering(_machines()) if again else _machines())
        known = self._cluster if self._discovered else cluster
        there = {n.name for n in known.nodes if {*n.workers} <= self._machines.keys()}
        self._cluster = part_of(known, there) if there else known
        return self._cluster

    def _look(self, cluster: Cluster, machines: Sequence[RayNode]) -> None:
        self._looked_s = time.monotonic()
        if self._discovered:
            names = {machine.id: name for name, machine in self._machines.items()}
            cluster = cluster_of_ray(machines, names) if machines else self._cluster
            if _has_accelerators(self._cluster) and not _has_accelerators(cluster):
                return  # nobody asked for a run on CPUs
            self._cluster = cluster
        found = matched(cluster, machines, self._simulate, self._machines)
        self._machines = found or self._machines

    def _watch(self, running: dict[Any, str]) -> None:
        """Take actors that Ray lost, or that never started, for lost."""
        ray = _ray()
        while running and not self._ended.is_set():
            done, _ = ray.wait(list(running), timeout=_LOOK_S)
            for ref in done:
                worker = running.pop(ref)
                if self._running.get(worker) is ref:  # else another has its place
                    self.connections.lose(worker, _last_words(ray, ref))


class _Worker:
    """A worker process; its one method ends when its controller has gone."""

    def work(self, bootstrap: str) -> None:
        serve = pkgutil.resolve_name(_ENTRY)  # JAX starts there
        serve(read_bootstrap(bootstrap))


def _actor(worker: str, cluster: Cluster, machine: RayNode, simulate: bool) -> Any:
    """Ask Ray for an actor on that machine with its part of the node's accelerators."""
    ray = _ray()
    (node,) = (node for node in cluster.nodes if worker in node.workers)
    pinned = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        machine.id, soft=False
    )
    virtual = simulate or machine.device == "cpu"
    accelerators = 0 if virtual else node.devices_per_host
    options: dict[str, Any] = {"scheduling_strategy": pinned, "num_cpus": 0}
    if machine.device.startswith("TPU"):
        options["resources"] = {"TPU": accelerators}
    else:
        options["num_gpus"] = accelerators
    passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
    passed |= malloc_environment()
    return (
        ray.remote(_Worker)
        .options(**options, runtime_env={"env_vars": passed})
        .remote()
    )


def _last_words(ray: Any, ref: Any) -> str:
    try:
        ray.get(ref)
    except Exception as error:  # whatever Ray has to say of the actor's end
        return f"ended: {str(error).splitlines()[0]}"
    return "has left"


def _has_accelerators(cluster: Cluster) -> bool:
    return any(node.device != "cpu" for node in cluster.nodes)


def _answering(machines: Sequence[RayNode]) -> list[RayNode]:
    """Those where Ray takes a connection: it is slow to tell of one that is dead."""
    with ThreadPoolExecutor(len(machines) or 1) as pool:
        there = list(pool.map(_answers, machines))
    return list(compress(machines, there))


def _answers(machine: RayNode) -> bool:
    try:
        socket.create_connection((machine.address, machine.port), _ANSWER_S).close()
    except OSError:
        return False
    return True


def _machines() -> list[RayNode]:
    ray = _ray()
    if not ray.is_initialized():
        with warnings.catch_warnings():
            # of JAX, whose threads Ray's new processes do not get to see
            warnings.filterwarnings("ignore", message=r"os\.fork\(\)")
            ray.init(include_dashboard=False)
    return ray_nodes(ray.nodes())


def _ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise BadInput(
            got="--launcher ray, and Ray is not installed",
            allowed="Ray on every machine of the run",
            fix="pip install 'hetjax[ray]'",
        ) from error
    return ray
