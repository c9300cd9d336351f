# SPDX-License-Identifier: Apache-2.0
"""Defines clusters: nodes of one device kind each, and the links between them.

Owns the `Cluster` tree and its consistency: a `Cluster` that exists is consistent. Does
not own its TOML (`cluster_files.py`), the figures of devices (`catalogue.py`), nor
which devices are there (`discovery.py`).
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from typing import Literal, get_args

from hetjax.cluster import ranges
from hetjax.cluster.speeds import AS_MODELLED, Speeds
from hetjax.errors import BadInput
from hetjax.names import RULE, is_node

Precision = Literal["bfloat16", "float16", "float32"]  # what a stage computes in

DEVICE_FIGURES = (  # figures of its devices that a node may give
    "peak_tflops",
    "memory_gib",
    "memory_gb_per_s",
    "intra_node_gb_per_s",
    "network_gbit_per_s",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Machines of one device kind: an island's hardware.

    `count` is the total over all `hosts`; device i is the i-th in (host, local id)
    order. `device` is a name of the device catalogue, or any name if the node gives the
    figures from `peak_tflops` on. These are per device and direction, except
    `network_gbit_per_s`, which is per host. `peak_tflops` is dense, in `precision`: the
    precision that such a device computes best in, by default the catalogue's, or bf16.
    The price and the preemptions are those of the whole node. `speeds` are those that
    runs measured; they are in no file.

    >>> Node(name="rented", device="L4", count=8, hosts=2, price_per_hour=6.0)
    Node(name='rented', device='L4', count=8, hosts=2, price_per_hour=6.0)
    """

    name: str
    device: str
    count: int
    hosts: int = 1
    zone: str = ""
    spot: bool = False
    price_per_hour: float | None = None
    preemptions_per_hour: float | None = None
    peak_tflops: float | None = None
    memory_gib: float | None = None
    memory_gb_per_s: float | None = None
    intra_node_gb_per_s: float | None = None
    network_gbit_per_s: float | None = None
    precision: Precision | None = None
    speeds: Speeds = field(default=AS_MODELLED, metadata={"in_files": False})

    def __repr__(self) -> str:
        """Show only the given fields: most nodes leave most to the catalogue."""
        said = (f for f in fields(self) if getattr(self, f.name) != f.default)
        fields_given = (f"{f.name}={getattr(self, f.name)!r}" for f in said)
        return f"Node({', '.join(fields_given)})"

    @property
    def devices_per_host(self) -> int:
        """The number of devices of each host; all hosts have equally many."""
        return self.count // self.hosts

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the node's worker processes, one per host in order."""
        if self.hosts == 1:
            return (self.name,)
        return tuple(f"{self.name}/{host}" for host in range(self.hosts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The link of two nodes, or the shared trunk of two zones; figures for one
    direction.

    >>> Link(between=("east", "west"), bandwidth_gbit_per_s=5.0, latency_ms=1.0).between
    ('east', 'west')
    """

    between: tuple[str, str]
    bandwidth_gbit_per_s: float
    latency_ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes in file order and the links that are not the catalogue's defaults.

    Raises BadInput for the first inconsistency.

    >>> old = Node(name="old", device="V100-SXM2-16GB", count=2)
    >>> new = Node(name="new", device="A100-SXM4-80GB", count=1)
    >>> cable = Link(between=("old", "new"), bandwidth_gbit_per_s=25.0)
    >>> Cluster(name="mine", nodes=(old, new), links=(cable,)).num_devices
    3
    """

    name: str
    nodes: tuple[Node, ...]
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        check_cluster(self)

    @property
    def num_devices(self) -> int:
        """The number of devices of all nodes."""
        return sum(node.count for node in self.nodes)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the nodes."""
        return frozenset(self._by_name)

    def node(self, name: str) -> Node:
        """Return the node of that name, which is in the cluster."""
        return self._by_name[name]

    def has_machines_of(self, other: "Cluster") -> bool:
        """Return whether both have the same nodes and links, whatever these cost and
        however often they vanish: the fastest plan is the same."""
        return (self._as_owned, self.links) == (other._as_owned, other.links)

    @cached_property
    def _as_owned(self) -> list[Node]:
        return [
            replace(node, price_per_hour=None, spot=False, preemptions_per_hour=None)
            for node in self.nodes
        ]

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}


def part_of(cluster: Cluster, names: Collection[str]) -> Cluster:
    """Return the cluster of only these nodes, with the links between them."""
    nodes = tuple(node for node in cluster.nodes if node.name in names)
    ends = {node.name for node in nodes} | {node.zone for node in nodes}
    links = tuple(link for link in cluster.links if set(link.between) <= ends)
    return replace(cluster, nodes=nodes, links=links)


def with_copies(cluster: Cluster, node: Node, num: int) -> Cluster:
    """Return the cluster plus copies of one of its nodes, each with its links."""
    names = [f"{node.name}-more-{n}" for n in range(num)]
    links = [
        replace(link, between=(named.get(a, a), named.get(b, b)))
        for named in ({node.name: name} for name in names)
        for link in cluster.links
        for a, b in [link.between]
        if node.name in (a, b)
    ]
    copies = (replace(node, name=name) for name in names)
    return replace(
        cluster, nodes=(*cluster.nodes, *copies), links=(*cluster.links, *links)
    )


def check_cluster(cluster: Cluster) -> None:
    """Raise BadInput for the first inconsistency in the cluster."""
    problems = chain(
        _name_problems(cluster),
        chain.from_iterable(map(_node_problems, cluster.nodes)),
        _link_end_problems(cluster),
        _link_problems(cluster),
    )
    for problem in problems:
        raise problem


def _name_problems(cluster: Cluster) -> Iterator[BadInput]:
    if not cluster.nodes:
        yield BadInput(
            got=f"cluster {cluster.name!r} with 0 nodes",
            allowed="1 node or more",
            fix="add a [[node]] with name, device and count",
        )
    for name, times in Counter(node.name for node in cluster.nodes).items():
        if times > 1:
            yield BadInput(
                got=f"{times} nodes named {name!r}",
                allowed="unique node names",
                fix="rename all but one of them",
            )
        if not is_node(name):
            yield BadInput(
                got=f"a node named {name!r}",
                allowed=RULE,
                fix='write a name such as "a100-0"',
            )
        if name in {node.zone for node in cluster.nodes}:
            yield BadInput(
                got=f"{name!r} names a node and a zone",
                allowed="different names for nodes and zones, since links use both",
                fix=f"rename the zone {name!r}",
            )


def _node_problems(node: Node) -> Iterator[BadInput]:
    if not node.device:
        yield BadInput(
            got=f"node {node.name!r}: device = ''",
            allowed="the name of a device kind",
            fix='write a device such as "A100-SXM4-80GB" or "cpu"',
        )
    if not ranges.COUNT.has(node.count):
        yield BadInput(
            got=f"node {node.name!r}: count = {node.count}",
            allowed=ranges.COUNT.allowed("count"),
            fix="write how many devices the node has, or remove the node",
        )
    if node.hosts < 1 or node.count % node.hosts:
        yield BadInput(
            got=f"node {node.name!r}: {node.count} devices on hosts = {node.hosts}",
            allowed=f"hosts in {_divisors(node.count)} (equally many devices each)",
            fix="change hosts, or give the host that differs a [[node]] of its own",
        )
    if node.precision not in (None, *get_args(Precision)):
        yield _out_of_range(node, "precision", ", ".join(get_args(Precision)))
    for key, range_ in ranges.NODE.items():
        value = getattr(node, key)
        if value is not None and not range_.has(value):
            yield _out_of_range(node, key, range_.allowed(key))


def _out_of_range(node: Node, key: str, allowed: str) -> BadInput:
    return BadInput(
        got=f"node {node.name!r}: {key} = {getattr(node, key)}",
        allowed=allowed,
        fix=f"correct {key} or remove the key",
    )


def _link_end_problems(cluster: Cluster) -> Iterator[BadInput]:
    nodes = sorted(cluster.names)
    zones = sorted({node.zone for node in cluster.nodes} - {""})
    known = {*nodes, *zones}
    lost = [link for link in cluster.links if not {*link.between} <= known]
    if lost:
        ends = sorted({end for link in lost for end in link.between} - known)
        add = f"add a [[node]] named {' and one named '.join(map(repr, ends))}"
        if "" in ends:
            add = "give the nodes without a zone one, and name that in `between`"
        yield BadInput(
            got=f"no node or zone is named {' or '.join(map(repr, ends))}: "
            + "; ".join(map(_shown, lost)),
            allowed=f"nodes: {', '.join(nodes)}; zones: {', '.join(zones) or 'none'}",
            fix=f"remove {'this [[link]]' if len(lost) == 1 else 'these [[link]]s'}, "
            f"or {add}",
        )
    for link in cluster.links:
        left, right = link.between
        if left == right or (left in nodes) != (right in nodes):
            yield BadInput(
                got=_shown(link),
                allowed="two different nodes or two different zones",
                fix="name two nodes, or two zones, in `between`",
            )


def _link_problems(cluster: Cluster) -> Iterator[BadInput]:
    seen: set[frozenset[str]] = set()
    for link in cluster.links:
        if frozenset(link.between) in seen:
            yield BadInput(
                got=f"a second {_shown(link)}",
                allowed="one link for each pair (it holds in both directions)",
                fix="remove one of them",
            )
        seen.add(frozenset(link.between))
        for key, range_ in ranges.LINK.items():
            value = getattr(link, key)
            if not range_.has(value):
                yield BadInput(
                    got=f"{_shown(link)}: {key} = {value}",
                    allowed=range_.allowed(key),
                    fix=f"write the {key.partition('_')[0]} of one direction",
                )


def _shown(link: Link) -> str:
    return f"link between {' and '.join(map(repr, link.between))}"


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
