# SPDX-License-Identifier: Apache-2.0
"""Builds the even split: the plan that a homogeneous system makes for any cluster.

Owns the choice of degrees and the placement by rank. Both deliberately ignore device
kinds, links and memory: this is the planner `even`, to compare others with. Does not
own better plans (`planner/`).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from hetjax.cluster.cluster import Cluster
from hetjax.errors import BadInput, counted_noun
from hetjax.plans.plan import Offload, Plan, Remat, Replica, Stage, StageMesh
from hetjax.plans.schedules import default_launch_ahead
from hetjax.plans.validation import tensor_problems


class _Group(NamedTuple):
    """Devices of one node that form a tensor-parallel stage."""

    node: str
    devices: tuple[int, ...]


def even_plan(
    cluster: Cluster,
    *,
    model: str,
    fingerprint: str | None = None,
    num_layers: int,
    seq_len: int,
    global_batch: int,
    microbatch_size: int = 1,
    tensor: int | None = None,
    pipeline: int | None = None,
    tensor_sizes: Mapping[str, Collection[int]],
    schedule: str = "1f1b",
    remat: Remat = "none",
    offload: Offload = "none",
) -> Plan:
    """Return symmetric replicas of even stages, whatever the devices are.

    Each replica has `pipeline` stages of `tensor` devices of one node, and as many
    microbatches as the others. Layers per stage are as even as possible (embedding and
    head count as a layer each). `tensor` defaults to 1, `pipeline` to the smallest
    number that uses the most devices. The number of replicas is the largest that has
    room and divides the microbatches; remaining devices stay idle. Raises BadInput if
    nothing fits.
    """
    tensor = 1 if tensor is None else tensor
    _check_counts(global_batch, microbatch_size, tensor)
    for problem in tensor_problems(tensor, tensor_sizes, where="tensor"):
        raise problem
    groups = _tensor_groups(cluster, tensor)
    microbatches = global_batch // microbatch_size
    if pipeline is None:
        pipeline = _default_pipeline(len(groups), num_layers, microbatches)
    _check_pipeline(pipeline, len(groups), num_layers)
    num_replicas = _num_replicas(len(groups) // pipeline, microbatches)
    replicas = [
        _replica(
            groups[r::num_replicas][:pipeline],
            num_layers,
            microbatches // num_replicas,
            microbatch_size,
            schedule,
            remat,
            offload,
        )
        for r in range(num_replicas)  # Megatron's rank order: tensor, data, stages
    ]
    return Plan(
        model=model,
        fingerprint=fingerprint,
        seq_len=seq_len,
        global_batch=global_batch,
        schedule=schedule,
        replicas=tuple(replicas),
    )


def _replica(
    groups: Sequence[_Group],
    num_layers: int,
    num_microbatches: int,
    microbatch_size: int,
    schedule: str,
    remat: Remat,
    offload: Offload,
) -> Replica:
    """Return a replica of even stages, one for each of the groups."""
    stages = tuple(
        Stage(
            node=group.node,
            devices=group.devices,
            mesh=StageMesh(tensor=len(group.devices)),
            layers=(num_layers * s // len(groups), num_layers * (s + 1) // len(groups)),
            remat=remat,
            offload=offload,
            launch_ahead=default_launch_ahead(
                schedule,
                num_stages=len(groups),
                stage=s,
                num_microbatches=num_microbatches,
            ),
        )
        for s, group in enumerate(groups)
    )
    return Replica(
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        stages=stages,
    )


def _tensor_groups(cluster: Cluster, tensor: int) -> list[_Group]:
    groups = [
        _Group(node.name, tuple(range(first, first + tensor)))
        for node in cluster.nodes
        for first in range(0, node.count - tensor + 1, tensor)
    ]
    if not groups:
        most = max(node.count for node in cluster.nodes)
        raise BadInput(
            got=f"tensor = {tensor}, but the largest node has "
            f"{counted_noun(most, 'device')}",
            allowed=f"tensor <= {most}",
            fix="lower tensor, or give another --cluster",
        )
    return groups


def _num_replicas(room: int, num_microbatches: int) -> int:
    """Return the largest replica count, at most `room`, that divides microbatches."""
    return next(d for d in range(room, 0, -1) if num_microbatches % d == 0)


def _default_pipeline(num_groups: int, num_layers: int, num_microbatches: int) -> int:
    def used(pipeline: int) -> int:
        return pipeline * _num_replicas(num_groups // pipeline, num_microbatches)

    # on ties, max keeps the first: the shortest pipeline, the most replicas
    return max(range(1, min(num_groups, num_layers) + 1), key=used)


def _check_counts(global_batch: int, microbatch_size: int, tensor: int) -> None:
    counts = {
        "global_batch": global_batch,
        "microbatch_size": microbatch_size,
        "tensor": tensor,
    }
    for name, count in counts.items():
        if count < 1:
            raise BadInput(
                got=f"{name} = {count}",
                allowed=f"{name} >= 1",
                fix=f"set {name} to 1 or more",
            )
    if global_batch % microbatch_size:
        raise BadInput(
            got=f"global_batch = {global_batch} with microbatch_size = "
            f"{microbatch_size}",
            allowed="a global_batch that is a multiple of microbatch_size",
            fix=f"write global_batch as "
            f"{global_batch + -global_batch % microbatch_size}, or change "
            "microbatch_size",
        )


def _check_pipeline(pipeline: int, num_groups: int, num_layers: int) -> None:
    most = min(num_groups, num_layers)
    if not 1 <= pipeline <= most:
        raise BadInput(
            got=f"pipeline = {pipeline}, with {num_layers} layers and room for "
            f"{num_groups} stages",
            allowed=f"pipeline from 1 to {most}",
            fix="lower pipeline or tensor, or give another --cluster",
        )
