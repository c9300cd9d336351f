# SPDX-License-Identifier: Apache-2.0
"""Maps a plan to the layers that each worker holds, and to those that it leads.

Owns these functions of a plan, and the plan itself, whose replicas differ in depth.
"""

from collections.abc import Sequence

from hetjax.cluster.cluster import Cluster
from hetjax.errors import NoFeasiblePlan
from hetjax.plans.plan import Plan, Replica, Stage


def workers_of(plan: Plan) -> list[str]:
    return [*dict.fromkeys(stage.node for _, _, stage in plan.stages())]


def layers_of(plan: Plan | None, layers: Sequence[str]) -> dict[str, list[str]]:
    """Return the layers of each worker's stages, in all replicas."""
    found: dict[str, list[str]] = {}
    for _, _, stage in plan.stages() if plan is not None else ():
        found.setdefault(stage.node, []).extend(layers[slice(*stage.layers)])
    return found


def led_by(worker: str, plan: Plan, layers: Sequence[str]) -> list[str]:
    """Return the layers that the worker saves and counts in the norm.

    Exactly one holder leads each layer.
    """
    by_worker = layers_of(plan, layers)
    found = []
    for number, layer in enumerate(layers):
        holders = [name for name, has in by_worker.items() if layer in has]
        if holders[number % len(holders)] == worker:
            found.append(layer)
    return found


def planned(
    cluster: Cluster, num_layers: int, num_replicas: int, most_layers: int
) -> Plan:
    """Return a plan of replicas of unlike depth, with at most `most_layers` on a node.

    Raises NoFeasiblePlan if the nodes together cannot hold all layers.
    """
    names = [node.name for node in cluster.nodes]
    num_replicas = min(num_replicas, len(names) * most_layers // num_layers)
    if not num_replicas:
        raise NoFeasiblePlan(got="too few nodes", allowed="more", fix="add one")
    replicas = []
    for number in range(num_replicas):
        nodes = names[number::num_replicas][:num_layers]
        cuts = [at * num_layers // len(nodes) for at in range(len(nodes) + 1)]
        stages = tuple(
            Stage(
                node=node, devices=(0,), layers=(cuts[at], cuts[at + 1]), launch_ahead=1
            )
            for at, node in enumerate(nodes)
        )
        replicas.append(Replica(num_microbatches=1, microbatch_size=1, stages=stages))
    return Plan(
        model="simulated",
        seq_len=8,
        global_batch=num_replicas,
        replicas=tuple(replicas),
    )
