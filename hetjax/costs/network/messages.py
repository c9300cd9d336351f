# SPDX-License-Identifier: Apache-2.0
"""How many bytes a message between two stages puts on its way.

Owns what the transports do, in numbers; the one definition that simulations and the
planner charge by, and that tests hold against what was counted. Between workers
(`hetjax/comm/wire.py`, `comm/pull.py`) every row goes once to each worker that needs
it, which copies it to its tensor ranks; inside one (`hetjax/mesh/reshard.py`) every
tensor rank gets a copy of its own. Does not own ways (`routes.py`).
"""

import math
from typing import Literal

from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.network.routes import Place, num_lanes

# how workers talk to each other; "in-process" is when all nodes are in one worker
Transport = Literal["sockets", "transfer", "in-process"]


def lane_share(
    cluster: Cluster,
    source: Place,
    target: Place,
    tensor: int,
    transport: Transport = "sockets",
) -> float:
    """Bytes on each lane of a message's route, per byte of the activation.

    `tensor` is the tensor degree of the receiver.
    """
    copies = _copies(cluster, source, target, tensor, transport)
    return copies / num_lanes(cluster, source, target)


def least_copies(source: Node, target: Node, tensor: int) -> int:
    """How often the activation travels at least, wherever on the nodes stages lie.

    Every tensor group has some worker, and as many as it needs hosts.
    """
    if source.name == target.name and target.hosts == 1:
        return tensor
    return math.ceil(tensor / target.devices_per_host)


def _copies(
    cluster: Cluster, source: Place, target: Place, tensor: int, transport: Transport
) -> float:
    """How often the activation travels; its data ranks need a part of it each."""
    workers = _workers(cluster, target)
    if transport == "in-process" or {*_workers(cluster, source), *workers} == {
        workers[0]
    }:
        return tensor
    ranks = [workers[at : at + tensor] for at in range(0, len(workers), tensor)]
    return sum(len(set(rank)) for rank in ranks) / len(ranks)


def _workers(cluster: Cluster, place: Place) -> list[str]:
    """By device of the place, who has it: one worker for each host."""
    name, devices = place
    node = next(node for node in cluster.nodes if node.name == name)
    return [node.workers[device // node.devices_per_host] for device in devices]
