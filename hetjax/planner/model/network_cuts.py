# SPDX-License-Identifier: Apache-2.0
"""Cuts of the network in two sides: the traffic across, and the work that it allows.

Owns the cuts of a request along its classes of nodes, the speed of each cut, and the
limit on the work of a side that holds no layer alone. Does not own how this proves
bounds (`bound/cut_bound.py`).

Derivation (ours). In a step of t seconds at most c t bytes cross a cut each way. A
layer is *mixed* if stages on both sides hold it. Its gradients are summed across the
cut. Whichever workers exchange them, this takes g bytes each way for each of the
layer's P_l trained elements (`costs/network/wire_bytes.py`). One of two cases holds:

* Some layer is on one side alone, and another layer on the other side alone. Then each
  of the G sequences crosses the cut, forward one way and backward the other, with at
  least b bytes: G b <= c t. If the first and the last layer hold the same P_e elements
  (a tied embedding), then either both sides hold these and sum them across the cut, or
  every sequence goes to the other side and returns: G b + min(g P_e, G b) <= c t.
* All layers that are not mixed are on one side, "home". Then the other side computes
  only mixed layers, of x elements together at most. A sequence of which it computes
  anything crosses the cut; y such sequences need y b + g x <= c t. Let w be the share
  of a sequence's elements in the layers that the other side computes, and P the number
  of all elements. Over all sequences w adds up to at most x y / P, which is at most
  (c t)^2 / (4 g b P). Sequences that the other side computes entirely need not cross,
  but then all layers are mixed, which requires g P <= c t.

An element that several layers hold (tied) is summed once if any of them is mixed. It
counts in equal shares for these layers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from hetjax.cluster.catalogue import device_spec
from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.measured.layer_profile import DTYPES
from hetjax.costs.network.wire_bytes import WIRE_BYTES
from hetjax.costs.stage_memory import hidden_size
from hetjax.models.model import Model, abstract_params, parameter_count
from hetjax.planner.model.request import PlanRequest

_ALL_SIDES = 5  # with more classes, only single classes and whole zones are cut off
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class WorkLimit:
    """A limit on the total work of a step's sequences, besides the limits on devices.

    `weight_OU` is a sequence's work in a stage, by option and range of layers, as a
    share of the whole model. `most_sequences` maps the seconds of a step to the limit,
    in whole sequences; it never falls as the seconds grow.
    """

    weight_OU: Floats
    most_sequences: Callable[[float], float]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A cut around some classes of nodes, by index. It has the bytes per second each
    way, and the bytes of a sequence's message, of all gradients, and of the gradients
    that the first and the last layer share."""

    side: frozenset[int]
    bytes_per_s: float
    message_bytes: float
    gradient_bytes: float
    tied_bytes: float
    global_batch: int

    @property
    def crossing_s(self) -> float:
        """The least seconds of a step in which every sequence crosses."""
        once_bytes = self.global_batch * self.message_bytes
        crossing_bytes = once_bytes + min(self.tied_bytes, once_bytes)
        return crossing_bytes / self.bytes_per_s if self.bytes_per_s else inf

    def most_sequences(self, step_s: float) -> float:
        """Return the most work of the side that is not home, in whole sequences."""
        crossing_bytes = self.bytes_per_s * step_s
        if crossing_bytes >= self.gradient_bytes:
            return self.global_batch
        most = crossing_bytes**2 / (4 * self.message_bytes * self.gradient_bytes)
        return min(most, self.global_batch)


def cuts_of(request: PlanRequest) -> list[Cut]:
    """Return the cuts of the network, slowest to cross first; none if no layer is
    trained."""
    elements = sum(trained_elements(request.model))
    each_bytes = WIRE_BYTES[request.gradient_wire]
    sent = {DTYPES[precision] for precision in request.precisions.values()}
    if not elements:
        return []
    found = [
        Cut(
            side=side,
            bytes_per_s=_bytes_per_s(request, side),
            message_bytes=request.seq_len * hidden_size(request.model) * min(sent),
            gradient_bytes=each_bytes * elements,
            tied_bytes=each_bytes * tied_at_both_ends(request.model),
            global_batch=request.global_batch,
        )
        for side in _sides(request)
    ]
    return sorted(found, key=lambda cut: -cut.crossing_s)


def trained_elements(model: Model) -> list[float]:
    """Return the number of trained elements of every layer. Elements that several
    layers hold count in equal shares for each."""
    found = [float(parameter_count(layer, trained=True)) for layer in model.layers]
    users: dict[str, set[int]] = {}
    for at, layer in enumerate(model.layers):
        for path in {path for module in layer.modules for _, path in module.tied}:
            users.setdefault(path, set()).add(at)
    for path, layers in users.items():
        elements = _trained_elements(model, path)
        each = elements / (len(layers) + 1)
        found[0] -= elements - each  # its owner's layer
        for at in layers:
            found[at] += each
    return found


def tied_at_both_ends(model: Model) -> int:
    """Return the number of trained elements that the first and last layer share."""
    paths = {path for module in model.layers[-1].modules for _, path in module.tied}
    return sum(_trained_elements(model, path) for path in paths)


def _trained_elements(model: Model, path: str) -> int:
    """Return the number of trained elements of the parameter with this full path."""
    owner = next(m for m in model.modules if path.startswith(f"{m.path}."))
    param = abstract_params(owner.unquantised)[path.removeprefix(f"{owner.path}.")]
    return prod(param.shape) if param.trained else 0


def _sides(request: PlanRequest) -> Iterator[frozenset[int]]:
    """Yield one side of every cut: each set of classes without the first, or, of many
    classes, each single class and each zone."""
    classes = range(len(request.classes))
    if len(classes) <= _ALL_SIDES:
        for size in range(1, len(classes)):
            yield from map(frozenset, combinations(classes[1:], size))
        return
    zones: dict[str, list[int]] = {}
    for c, nodes in enumerate(request.classes):
        zones.setdefault(nodes.nodes[0].zone, []).append(c)
    sides = [frozenset({c}) for c in classes]
    sides += map(frozenset, zones.values()) if len(zones) > 1 else ()
    yield from dict.fromkeys(sides)


def _bytes_per_s(request: PlanRequest, side: frozenset[int]) -> float:
    """Return the cut's capacity each way: the least of either side's network cards and,
    if no zone is cut, the links between zones; plus the links between two nodes."""
    network = request.network
    inside = {n.name for c in side for n in request.classes[c].nodes}
    ours = [node for node in network.nodes if node.name in inside]
    others = [node for node in network.nodes if node.name not in inside]
    by_cards = min(
        _cards_bytes_per_s(_without_links(network, ours, others)),
        _cards_bytes_per_s(_without_links(network, others, ours)),
    )
    our_zones, other_zones = ({n.zone for n in part} for part in (ours, others))
    by_zones = inf
    if not our_zones & other_zones:
        by_zones = _links_bytes_per_s(network, our_zones, other_zones)
    between = _links_bytes_per_s(network, inside, {node.name for node in others})
    return min(by_cards, by_zones) + between


def _without_links(
    network: Cluster, nodes: Sequence[Node], others: Sequence[Node]
) -> list[Node]:
    """Return the nodes that reach some of `others` by their cards. A link between two
    nodes takes the place of their cards."""
    joined = {link.between for link in network.links}
    joined |= {(b, a) for a, b in joined}
    return [
        node
        for node in nodes
        if any((node.name, other.name) not in joined for other in others)
    ]


def _cards_bytes_per_s(nodes: Sequence[Node]) -> float:
    gbit_per_s = sum(n.hosts * device_spec(n).network_gbit_per_s for n in nodes)
    return gbit_per_s * 1e9 / 8


def _links_bytes_per_s(network: Cluster, one: set[str], other: set[str]) -> float:
    """Return what the links from `one` to `other` carry."""
    gbit_per_s = sum(
        link.bandwidth_gbit_per_s
        for link in network.links
        for a, b in (link.between, link.between[::-1])
        if a in one and b in other
    )
    return gbit_per_s * 1e9 / 8
