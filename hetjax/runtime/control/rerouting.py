# SPDX-License-Identifier: Apache-2.0
"""Continues at once with the replicas that are left: the controller's side.

Owns the switch to a plan in which they train on all samples. No state moves, and
nothing waits for a worker to start. Does not own the shares (`plans/rerouting.py`), a
worker's part of the switch (`execution/stage_runtime.py`), nor when to switch and when
the other replicas come back (`hetjax/training/recovery/`).
"""

from collections.abc import Sequence

from hetjax.plans.plan import Plan
from hetjax.plans.rerouting import rerouted
from hetjax.plans.worker_map import WorkerMap, node_of
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.rpc import schema
from hetjax.runtime.rpc.schema import TransportName


def take_over(
    controller: Controller,
    whole: Plan,
    workers: Sequence[str],
    transport: TransportName = "sockets",
) -> int | None:
    """Let the replicas that `workers` hold completely train on all samples.

    Workers of the `whole` plan were built for it; a step that one of them has committed
    must be finished first (`recovery.py`). Returns the number of steps that they have
    completed. Returns None if no replica is complete, or if the complete ones do not
    all have the same state: the caller must then recover in another way. Raises
    WorkerLost.
    """
    connections, nodes = controller.connections, controller.members.nodes
    built_for = WorkerMap(whole, nodes).workers
    plan = rerouted(whole, {node_of(w) for w in built_for if w not in workers})
    if plan is None:
        return None
    controller.reroute(plan, [worker for worker in built_for if worker in workers])
    answers = connections.ask(dict.fromkeys(controller.workers, schema.TellReached()))
    at, *others = {reached.at for reached in answers.values()}
    if at is None or others:
        return None
    controller.connect(transport)
    return at
