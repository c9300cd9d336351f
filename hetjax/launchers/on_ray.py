# SPDX-License-Identifier: Apache-2.0
"""Defines the launcher `ray`: workers on the machines of a Ray cluster, an actor each.

Owns placing, starting and watching the workers, and which machines are there; Ray
collects their output. No data of a step passes through Ray: controller and workers have
their own connections, and Ray pickles only a few short strings for us. Does not own
which machine is which node (`hetjax/cluster/machines.py`), nor what a worker does
(`hetjax/training/worker.py`).
"""

import os
import pkgutil
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import compress
from pathlib import Path
from typing import Any

from hetjax.cluster.cluster import Cluster, Node, part_of
from hetjax.cluster.local_devices import LocalDevice, devices_json, read_devices
from hetjax.cluster.machines import Machine, matched
from hetjax.cluster.ray_nodes import (
    cluster_of_ray,
    has_gpus,
    on_ray_nodes,
    ray_nodes,
    with_known_figures,
)
from hetjax.errors import BadInput
from hetjax.launchers.bootstraps import FIRST_START, Bootstraps, StartTerms
from hetjax.launchers.device_probe import accelerators_here
from hetjax.launchers.isolation import memory_share, passed_on, visible_devices
from hetjax.launchers.launcher import Launcher, LaunchRequest, RunOnNode
from hetjax.mesh.process_setup import malloc_environment
from hetjax.runtime.rpc.worker_connections import WorkerLost
from hetjax.runtime.worker.bootstrap import read_bootstrap

_ENTRY = "hetjax.training.worker:serve_run"  # in a room above: by name
_LOOK_S = 0.5
_MACHINES_S = 5.0  # least time between queries of Ray's machines while all goes well
_SEEN_S = 60.0  # timeout of a probe of the GPUs of new machines, all at once
_ANSWER_S = 1.0  # timeout of a machine's answer; Ray itself waits far longer


def open_launcher(request: LaunchRequest, stack: ExitStack) -> Launcher:
    """Make the launcher `ray`; BadInput if a node has no machine, or too few."""
    return OnRay(
        request.cluster,
        stack,
        simulate=request.simulate,
        discovered=request.discovered,
        terms=request.terms,
    )


def find_cluster(hosts: Path | None) -> Cluster:
    """Return the cluster that Ray's machines form; joins or starts Ray."""
    return cluster_of_ray(_Machines().now())


def run_on_nodes(cluster: Cluster, hosts: Path | None) -> RunOnNode:
    """Return a function that runs `python -m MODULE ARGUMENT` on a node's machine.

    The module gets the node's devices. The function raises TimeoutExpired after that
    many seconds, and BadInput if a node has no machine.
    """

    def run(
        node: Node, module: str, argument: str, limit_s: float
    ) -> subprocess.CompletedProcess[str]:
        ray = _ray()
        machine = on_ray_nodes(cluster, _Machines().now(), simulate=False)[
            node.workers[0]
        ]
        options = _on(machine.id) | _accelerators_of(node, machine, simulate=False)
        visible = _visible(node, machine, simulate=False)
        task = ray.remote(_ran).options(**options, max_retries=0)
        running = task.remote(module, argument, visible, limit_s)
        try:
            done = ray.get(running, timeout=limit_s + _SEEN_S)
        except ray.exceptions.GetTimeoutError:  # Ray has not started it
            ray.cancel(running)
            done = None
        except ray.exceptions.RayError as error:
            return subprocess.CompletedProcess(module, 1, "", str(error))
        if done is None:
            raise subprocess.TimeoutExpired(module, limit_s)
        return done

    return run


class OnRay:
    """An actor for each worker, on the machine of its node; `stack` ends them all.

    A cluster that is `discovered` takes in every machine that Ray gets.
    """

    def __init__(
        self,
        cluster: Cluster,
        stack: ExitStack,
        *,
        simulate: bool,
        discovered: bool,
        terms: StartTerms = FIRST_START,
    ) -> None:
        """Raise BadInput if a node has no machine, or too few."""
        self._cluster, self._simulate, self._stack = cluster, simulate, stack
        self._discovered = discovered
        self._all = _Machines()
        self._machines = on_ray_nodes(cluster, self._all.now(), simulate)
        self._looked_s = time.monotonic()
        own = _ray().util.get_node_ip_address()
        self._bootstraps = Bootstraps(own, stack, terms)
        self.connections = self._bootstraps.connections
        self._actors: dict[str, Any] = {}
        self._running: dict[str, Any] = {}
        self._begun_s: dict[str, float] = {}
        self._last_words: dict[str, str] = {}
        self._ended = threading.Event()
        stack.callback(self._ended.set)

    def start(self, workers: Sequence[str]) -> None:
        self.begin(workers)
        self.connections.wait_for(workers, lambda: self._check(workers))

    def begin(self, workers: Sequence[str]) -> None:
        ray = _ray()
        for worker in workers:
            if earlier := self._actors.pop(worker, None):
                self._running.pop(worker)
                ray.kill(earlier)
            self._last_words.pop(worker, None)
            machine = self._machines[worker]
            (node,) = (n for n in self._cluster.nodes if worker in n.workers)
            actor = _actor(node, machine, self._simulate)
            self._stack.callback(ray.kill, actor)
            self._actors[worker], self._begun_s[worker] = actor, time.monotonic()
            bootstrap = self._bootstraps.bootstrap_for(worker, machine.address).text()
            self._running[worker] = actor.work.remote(
                _ENTRY, bootstrap, _visible(node, machine, self._simulate)
            )
        running = {self._running[worker]: worker for worker in workers}
        threading.Thread(target=self._watch, args=(running,), daemon=True).start()

    def are_there(self, workers: Sequence[str]) -> bool:
        begun_s = min((self._begun_s[worker] for worker in workers), default=0.0)
        check = lambda: self._check(workers)  # noqa: E731
        return self.connections.have_called(workers, begun_s, check)

    @property
    def pids(self) -> Mapping[str, int]:
        """Empty: the processes are Ray's, and `ray list actors` shows them."""
        return {}

    def present(self, cluster: Cluster, again: bool) -> Cluster | None:
        """Return the nodes that have machines now; None if none has, or the previous
        nodes if they were discovered."""
        if again or time.monotonic() - self._looked_s >= _MACHINES_S:
            there = self._all.now()
            self._look(cluster, _answering(there) if again else there)
        known = self._cluster if self._discovered else cluster
        there = {n.name for n in known.nodes if {*n.workers} <= self._machines.keys()}
        self._cluster = part_of(known, there) if there else known
        return self._cluster if there or self._discovered else None

    def _look(self, cluster: Cluster, machines: Sequence[Machine]) -> None:
        self._looked_s = time.monotonic()
        if self._discovered:
            names = {machine.part: name for name, machine in self._machines.items()}
            found = cluster_of_ray(machines, names) if machines else self._cluster
            cluster = with_known_figures(found, self._cluster)
            if _has_accelerators(self._cluster) and not _has_accelerators(cluster):
                return  # the user did not ask for a run on CPUs
            self._cluster = cluster
        found = matched(cluster, machines, self._simulate, self._machines)
        self._machines = found or self._machines

    def _check(self, workers: Sequence[str]) -> None:
        """Raise WorkerLost for a worker that ended before it connected."""
        for worker in workers:
            if worker in self._last_words:
                raise WorkerLost(worker, self._last_words[worker])

    def _watch(self, running: dict[Any, str]) -> None:
        """Report workers as lost if Ray lost their actors or never started them."""
        ray = _ray()
        while running and not self._ended.is_set():
            done, _ = ray.wait(list(running), timeout=_LOOK_S)
            for ref in done:
                worker = running.pop(ref)
                if self._running.get(worker) is ref:  # else another replaced it
                    self._last_words[worker] = _last_words(ray, ref)
                    self.connections.lose(worker, self._last_words[worker])


class _Worker:
    """A worker process; its one method ends when its controller is gone."""

    def work(self, entry: str, bootstrap: str, visible: Mapping[str, str]) -> None:
        """Serve the controller; `visible` are variables to set before JAX starts."""
        os.environ.update(visible)
        os.environ.update(memory_share(os.environ))
        serve = pkgutil.resolve_name(entry)  # JAX starts there
        serve(read_bootstrap(bootstrap))


def _actor(node: Node, machine: Machine, simulate: bool) -> Any:
    """Ask Ray for an actor on that machine with its part of the node's accelerators."""
    options = _on(machine.id) | _accelerators_of(node, machine, simulate)
    return _ray().remote(_Worker).options(**options).remote()


def _accelerators_of(node: Node, machine: Machine, simulate: bool) -> dict[str, Any]:
    """Return the options by which Ray assigns the node's accelerators on a machine."""
    number = 0 if _is_virtual(machine, simulate) else node.devices_per_host
    if machine.device.startswith("TPU"):
        return {"resources": {"TPU": number}}
    return {"num_gpus": number}


def _visible(node: Node, machine: Machine, simulate: bool) -> dict[str, str]:
    """Return the variables that show a worker its own devices.

    Returns none if all devices of the machine are alike, because Ray then sets them.
    If they differ, Ray only counts how many are free, not which.
    """
    if _is_virtual(machine, simulate):
        return visible_devices((), ())
    own = machine.own[: node.devices_per_host]
    return visible_devices(own, machine.own) if own else {}


def _is_virtual(machine: Machine, simulate: bool) -> bool:
    return simulate or machine.device == "cpu"


def _on(machine_id: str) -> dict[str, Any]:
    """Return options to run on that machine, beside all else that runs there."""
    pinned = _ray().util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        machine_id, soft=False
    )
    # variables that must be set before JAX starts there
    variables = passed_on(os.environ) | malloc_environment()
    return {
        "scheduling_strategy": pinned,
        "num_cpus": 0,
        "runtime_env": {"env_vars": variables},
    }


def _ran(
    module: str, argument: str, visible: Mapping[str, str], limit_s: float
) -> subprocess.CompletedProcess[str] | None:
    """Run a module on this machine, with these variables; None if it takes too long."""
    try:
        return subprocess.run(
            [sys.executable, "-m", module, argument],
            capture_output=True,
            env={**os.environ, **visible},
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return None


def _accelerators() -> str:
    """Return the accelerators of the machine where this runs, without holding any."""
    return devices_json(accelerators_here(os.environ))


class _Machines:
    """Ray's machines, and the GPUs that they really have: each is probed once."""

    def __init__(self) -> None:
        self._seen: dict[str, list[LocalDevice]] = {}

    def now(self) -> list[Machine]:
        """Return the machines that are alive; join or start Ray."""
        reported = _joined().nodes()
        new = [
            raw for raw in reported if has_gpus(raw) and raw["NodeID"] not in self._seen
        ]
        self._look(new)
        return ray_nodes(reported, self._seen)

    def _look(self, new: Sequence[Mapping[str, Any]]) -> None:
        """Probe these machines; if one does not answer, warn and use what Ray says."""
        ray = _ray()
        look = ray.remote(_accelerators)
        asked = {look.options(**_on(raw["NodeID"])).remote(): raw for raw in new}
        if not asked:
            return
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_SEEN_S)
        for ref, raw in asked.items():
            try:
                found = read_devices(ray.get(ref)) if ref in done else []
            except ray.exceptions.RayError:
                found = []
            self._seen[raw["NodeID"]] = found
            if not found:
                warnings.warn(
                    f"the GPUs of Ray's machine {raw['NodeManagerAddress']} cannot be "
                    "probed: using what Ray reports, all of one kind",
                    stacklevel=2,
                )


def _last_words(ray: Any, ref: Any) -> str:
    try:
        ray.get(ref)
    except Exception as error:  # whatever Ray reports of the actor's end
        return f"ended: {str(error).splitlines()[0]}"
    return "has left"


def _has_accelerators(cluster: Cluster) -> bool:
    return any(node.device != "cpu" for node in cluster.nodes)


def _answering(machines: Sequence[Machine]) -> list[Machine]:
    """Return machines where Ray accepts a connection: it reports dead ones late."""
    with ThreadPoolExecutor(len(machines) or 1) as pool:
        there = list(pool.map(_answers, machines))
    return list(compress(machines, there))


def _answers(machine: Machine) -> bool:
    try:
        socket.create_connection((machine.address, machine.port), _ANSWER_S).close()
    except OSError:
        return False
    return True


def _joined() -> Any:
    ray = _ray()
    if not ray.is_initialized():
        with warnings.catch_warnings():
            # JAX warns about its threads, which Ray's new processes do not use
            warnings.filterwarnings("ignore", message=r"os\.fork\(\)")
            ray.init(include_dashboard=False)
    return ray


def _ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise BadInput(
            got="--launcher ray, but Ray is not installed",
            allowed="Ray on every machine of the run",
            fix="pip install 'hetjax[ray]'",
        ) from error
    return ray
