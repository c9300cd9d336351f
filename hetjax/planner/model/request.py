# SPDX-License-Identifier: Apache-2.0
"""Defines the planning request: model, cluster, batch, and the open choices.

Owns the request, its limits, and the grouping of like nodes into classes. Does not own
costs (`terms.py`) nor the objectives besides a short step (`objectives.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from hetjax.cluster.catalogue import Precision, canonical_name
from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.costs.certainty.calibration import UNCALIBRATED, StepCalibration
from hetjax.costs.measured.compiled import CompiledBytes
from hetjax.costs.measured.layer_profile import Profile
from hetjax.costs.network.wire_bytes import GradientWire
from hetjax.costs.plan_costs import with_measured_links
from hetjax.costs.precisions import priced_precision
from hetjax.costs.stage_memory import adam_state
from hetjax.errors import BadInput, NoFeasiblePlan
from hetjax.models.attention.attention import head_sizes
from hetjax.models.model import Model, tensor_sizes
from hetjax.plans.attention import Attention, Heads, node_attention, with_forms
from hetjax.plans.plan import (
    AttentionForm,
    Offload,
    OffloadChoice,
    Plan,
    Remat,
    StageKey,
)
from hetjax.plans.precision import Dtype, with_node_precisions
from hetjax.stage.arrays import OptimizerInit

REMATS: tuple[Remat, ...] = ("none", "selective", "full")
OFFLOADS: Mapping[OffloadChoice, tuple[Offload, ...]] = {
    "none": ("none",),
    "optimizer": ("optimizer",),
    "auto": ("none", "optimizer"),
}

LARGE = 128  # devices; the search is cut short on larger clusters
_DEEP = 256  # layers; the full search of a deeper model would take hours


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeClass:
    """Nodes that differ only in their names."""

    name: str
    nodes: tuple[Node, ...]

    @property
    def num_devices(self) -> int:
        return sum(node.count for node in self.nodes)

    @property
    def devices_per_node(self) -> int:
        return self.nodes[0].count


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanRequest:
    """The input of the planner.

    All replicas shard a layer alike, so that summing its gradients needs no resharding
    (AutoHet, arXiv 2512.20953). So templates are searched with one tensor degree at a
    time; only copies of one pipeline (`baselines/equal_shares.py`) may have another
    degree in every stage. With `unequal_tensor` every stage of every replica has its
    own degree.

    `microbatch_sizes` count sequences before the split over `data`. `dtype` and
    `attention` are what the user asked for; None or "best": the best of every device
    kind. `offloads` are what stages may keep on their host, on nodes with one host.
    `compiled` are a compiler's figures for programs. `calibration` is what measured
    runs taught; the cluster's speeds already include it. `usd_per_kwh` is the price of
    electricity where it counts (`cluster/prices.py`). `gradient_wire` is the format in
    which workers send gradients.
    """

    model: Model
    cluster: Cluster
    seq_len: int
    global_batch: int
    dtype: Dtype | None = None
    attention: Attention | None = None
    packed: bool = False
    optimizer: OptimizerInit = adam_state
    profile: Profile | None = None
    compiled: CompiledBytes = field(default_factory=dict)
    calibration: StepCalibration = UNCALIBRATED
    microbatch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    tensor_degrees: tuple[int, ...] = (1, 2, 4, 8)
    data_degrees: tuple[int, ...] = (1, 2, 4, 8)
    remats: tuple[Remat, ...] = REMATS
    offloads: tuple[Offload, ...] = OFFLOADS["none"]
    unequal_tensor: bool = False
    usd_per_kwh: float | None = None
    gradient_wire: GradientWire = "float32"

    @property
    def is_large(self) -> bool:
        return self.cluster.num_devices > LARGE

    @property
    def is_deep(self) -> bool:
        """Whether one pricing takes many seconds."""
        return len(self.model.layers) > _DEEP

    @cached_property
    def network(self) -> Cluster:
        """The cluster, with the profile's measured links."""
        if self.profile is None:
            return self.cluster
        return with_measured_links(self.cluster, self.profile)

    @cached_property
    def classes(self) -> tuple[NodeClass, ...]:
        return node_classes(self.cluster)

    @cached_property
    def class_of(self) -> Mapping[str, str]:
        """The class name of every node, by node name."""
        return {node.name: some.name for some in self.classes for node in some.nodes}

    @cached_property
    def precisions(self) -> Mapping[str, Precision]:
        """The precision of stages, by node name; the same within a class."""
        found: dict[str, Precision] = {
            node.name: priced_precision(node, self.profile, self.dtype)
            for node in self.cluster.nodes
        }
        return found

    def said(self, plan: Plan) -> Plan:
        """Return the plan with missing precisions and attention forms filled in."""
        plan = with_node_precisions(plan, self.precisions)
        if all(stage.attention for _, _, stage in plan.stages()):
            return plan
        forms: dict[StageKey, AttentionForm] = {
            (r, s): stage.attention or self.attentions[stage.node]
            for r, s, stage in plan.stages()
        }
        return with_forms(plan, forms)

    @cached_property
    def attentions(self) -> Mapping[str, AttentionForm]:
        """The attention form of stages, by node name.

        Raises BadInput if some node cannot run the form that the user asked for.
        """
        heads = Heads(
            seq_len=self.seq_len,
            head_sizes=head_sizes(self.model),
            packed=self.packed,
        )
        found: dict[str, AttentionForm] = {
            node.name: node_attention(
                node, self.precisions[node.name], heads, self.attention
            )
            for node in self.cluster.nodes
        }
        return found

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """The tensor degrees that divide the model and fit on some node.

        Raises BadInput if there are none.
        """
        most = max(node.count for node in self.cluster.nodes)
        sizes = [size for found in tensor_sizes(self.model).values() for size in found]
        found = tuple(
            degree
            for degree in sorted(set(self.tensor_degrees))
            if 1 <= degree <= most and not any(size % degree for size in sizes)
        )
        if not found:
            raise BadInput(
                got="tensor degrees " + ", ".join(map(str, self.tensor_degrees)),
                allowed=f"degrees up to {most}, the devices of the largest node, that "
                f"divide the sizes that {self.model.name!r} splits",
                fix="give --tensor 1, say",
            )
        return found


def may_offload(offload: Offload, node: Node) -> bool:
    """Return whether stages on the node may do this; offloading needs a single host."""
    return offload == "none" or node.hosts == 1


def can_offload(cluster: Cluster, offloads: Sequence[Offload]) -> bool:
    """Return whether some node of the cluster allows one of these offloads."""
    return any(may_offload(o, node) for o in offloads for node in cluster.nodes)


def node_classes(cluster: Cluster) -> tuple[NodeClass, ...]:
    """Return the nodes by class, in the order of the cluster file.

    Nodes with their own links are alike if equal links lead to the same other ends.
    """
    found: dict[tuple[Node, frozenset[Link]], list[Node]] = {}
    for node in cluster.nodes:
        device = canonical_name(node.device)
        key = replace(node, name="", device=device), _links(cluster, node)
        found.setdefault(key, []).append(node)
    names = _class_names([nodes[0] for nodes in found.values()])
    return tuple(
        NodeClass(name=names[nodes[0].name], nodes=tuple(nodes))
        for nodes in found.values()
    )


def check_request(request: PlanRequest) -> None:
    """Raise BadInput for the first number out of range. Raise NoFeasiblePlan if the
    request demands offloading and no node can offload."""
    model, most = request.model, 2**24
    for name, highest in {"seq_len": model.max_seq_len, "global_batch": most}.items():
        if not 1 <= getattr(request, name) <= highest:
            raise BadInput(
                got=f"{name} = {getattr(request, name)}",
                allowed=f"1 <= {name} <= {highest}",
                fix=f"give --{name.replace('_', '-')} from 1 to {highest}",
            )
    options = {"microbatch_sizes": "--microbatch-sizes", "tensor_degrees": "--tensor"}
    for name, option in options.items():
        values: tuple[int, ...] = getattr(request, name)
        if not values or min(values) < 1:
            raise BadInput(
                got=f"{name} = {', '.join(map(str, values)) or 'none'}",
                allowed="numbers from 1",
                fix=f"give for example {option} 1 2 4",
            )
    if not can_offload(request.cluster, request.offloads):
        nodes = request.cluster.nodes
        named = ", ".join(f"{node.name} ({node.hosts} hosts)" for node in nodes[:3])
        more = ", ..." if len(nodes) > 3 else ""
        raise NoFeasiblePlan(
            got=f"--offload optimizer, but all nodes have several hosts: {named}{more}",
            allowed="masters and optimizer state on the hosts of nodes with one host "
            "each",
            fix="leave --offload out, or write each host as a node of its own, with a "
            "link between them",
        )


def _links(cluster: Cluster, node: Node) -> frozenset[Link]:
    return frozenset(
        replace(link, between=(other, ""))
        for link in cluster.links
        if node.name in link.between
        for other in link.between
        if other != node.name
    )


def _class_names(firsts: list[Node]) -> dict[str, str]:
    """Return the device's name, plus the first node's if several classes share it."""
    devices = [canonical_name(node.device) for node in firsts]
    return {
        node.name: device if devices.count(device) == 1 else f"{device} ({node.name})"
        for node, device in zip(firsts, devices, strict=True)
    }
