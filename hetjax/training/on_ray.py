# SPDX-License-Identifier: Apache-2.0
"""Workers on the machines of a Ray cluster, an actor each.

Owns placing, starting and watching them; Ray gathers what they print. Nothing of a step
passes through Ray: controller and workers talk over links of their own, and no object
of ours is pickled but a few words of text. Does not own which machine is which node
(`hetjax/cluster/ray_nodes.py`), nor what a worker does (`worker.py`).
"""

import os
import threading
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from hetjax.cluster.cluster import Cluster
from hetjax.cluster.ray_nodes import (
    RayNode,
    cluster_of_ray,
    on_ray_nodes,
    ray_nodes,
)
from hetjax.errors import BadInput
from hetjax.mesh.simulated import keeping_environment
from hetjax.plans.plan import Plan
from hetjax.runtime.control import Crew
from hetjax.runtime.fleet import Fleet
from hetjax.runtime.serving import read_post, serve
from hetjax.training.launching import posted

_START_S = 180.0  # until a worker has called: Ray starts it, and it imports JAX
_LOOK_S = 0.5
# what a worker must know before JAX starts there
_PASSED = ("XLA_FLAGS", "JAX_PLATFORMS", "PJRT_NPROC", "PYTHONPATH")


def ray_cluster() -> Cluster:
    """Return the cluster that Ray's machines make; joins or starts Ray."""
    return cluster_of_ray(_machines())


def on_ray(plan: Plan, cluster: Cluster, stack: ExitStack, *, simulate: bool) -> Fleet:
    """Start an actor for each node of the plan; `stack` ends them all.

    BadInput if a node has no machine, WorkerLost where one does not come up.
    """
    ray = _ray()
    machines = on_ray_nodes(cluster, _machines(), simulate)
    addresses = {name: machine.address for name, machine in machines.items()}
    fleet, posts = posted(plan, ray.util.get_node_ip_address(), addresses, stack)
    running: dict[str, Any] = {}
    for post in posts:
        actor = _actor(post.worker, cluster, machines[post.worker], simulate)
        stack.callback(ray.kill, actor)
        running[post.worker] = actor.work.remote(post.text())
    _watch(running, fleet.crew, stack)
    fleet.crew.wait_for(fleet.workers, _START_S)
    return fleet


class _Worker:
    """A worker process; its one method ends when its controller has gone."""

    def work(self, post: str) -> None:
        from hetjax.training.worker import training_work  # JAX starts there

        told = read_post(post)
        serve(told, lambda settings: training_work(told.worker, settings))


def _actor(worker: str, cluster: Cluster, machine: RayNode, simulate: bool) -> Any:
    """Ask Ray for an actor on that machine with the node's accelerators."""
    ray = _ray()
    (node,) = (node for node in cluster.nodes if node.name == worker)
    pinned = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        machine.id, soft=False
    )
    accelerators = 0 if simulate or machine.device == "cpu" else node.count
    options: dict[str, Any] = {"scheduling_strategy": pinned, "num_cpus": 0}
    if machine.device.startswith("TPU"):
        options["resources"] = {"TPU": accelerators}
    else:
        options["num_gpus"] = accelerators
    passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
    passed |= keeping_environment()
    return (
        ray.remote(_Worker)
        .options(**options, runtime_env={"env_vars": passed})
        .remote()
    )


def _watch(running: Mapping[str, Any], crew: Crew, stack: ExitStack) -> None:
    """Tell the crew of actors that Ray lost, or that never started."""
    ray, ended = _ray(), threading.Event()
    stack.callback(ended.set)

    def look() -> None:
        workers = {ref: name for name, ref in running.items()}
        while workers and not ended.is_set():
            done, _ = ray.wait(list(workers), timeout=_LOOK_S)
            for ref in done:
                crew.lose(workers.pop(ref), _last_words(ray, ref))

    threading.Thread(target=look, name="ray", daemon=True).start()


def _last_words(ray: Any, ref: Any) -> str:
    try:
        ray.get(ref)
    except Exception as error:  # whatever Ray has to say of the actor's end
        return f"ended: {str(error).splitlines()[0]}"
    return "has left"


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
