# SPDX-License-Identifier: Apache-2.0
"""The controller's side of going on at once with the replicas that are left.

Owns getting them to a plan in which they have the samples of all. No state moves and
nobody waits for a worker to be started. Does not own the shares
(`plans/rerouting.py`), what a worker does about them (`execution/stage_runtime.py`),
nor when it is done and the others come back (`hetjax/training/recovery/`).
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
    """Let the whole replicas that `workers` have of a plan train on all samples.

    Those of them that the `whole` plan has were built for it; a step that one has
    committed is finished before (`recovery.py`). Returns how many steps they have
    behind them. None if no replica is whole, or if those that are have no common state:
    then recover otherwise. Raises WorkerLost.
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
