# SPDX-License-Identifier: Apache-2.0
"""Cuts of a network in two sides: what crosses them, and what that leaves to do.

Owns the cuts of a request along its classes of nodes, how fast each is, and the limit
on the work of one side where nothing of the model is there alone. Does not own how
bounds are proved by it (`bound/cut_bound.py`).

Derivation (ours). In a step of t seconds no more than c t bytes cross a cut either way.
A layer is *mixed* if stages on both sides hold it. Its gradients are summed across the
cut, which takes g bytes of each of its P_l trained elements each way, whoever exchanges
them (`costs/network/wire_bytes.py`). Now either

* some layer is on one side alone, and another on the other. Then each of the G
  sequences crosses the cut, forward one way and backward the other, with at least b
  bytes: G b <= c t. If the first layer and the last hold the same P_e elements (a tied
  embedding), then either they are on both sides, and summed across the cut, or every
  sequence goes to the other side and comes back: G b + min(g P_e, G b) <= c t; or
* all layers that are not mixed are on one side, "home". Then what the other side does
  of a sequence are mixed layers, of x elements together at most, and a sequence of
  which it does anything crosses the cut, so that y of them do with y b + g x <= c t.
  Let w be the share of a sequence's elements in the layers that the other side does.
  Over all sequences, w adds up to x y / P at most, of P elements in all, which is at
  most (c t)^2 / (4 g b P). Sequences of which the other side does everything need not
  cross, but then all layers are mixed: only if g P <= c t.

An element that several layers hold (tied) is summed once, if any of them is mixed; it
counts for each of them by an equal share.
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

_ALL_SIDES = 5  # classes: of more only single ones and whole zones are cut off
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class WorkLimit:
    """What all sequences of a step may do together, besides what devices can.

    `weight_OU` is what a sequence does in a stage, by its option and range of layers,
    as a share of the whole model; `most_sequences` gives what there is of it, in whole
    sequences, by the seconds of the step, which it does not fall with.
    """

    weight_OU: Floats
    most_sequences: Callable[[float], float]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A cut around some classes of nodes, by index: bytes per second each way, and the
    bytes of a sequence's message, of all gradients, and of those of elements that the
    first layer and the last share."""

    side: frozenset[int]
    bytes_per_s: float
    message_bytes: float
    gradient_bytes: float
    tied_bytes: float
    global_batch: int

    @property
    def crossing_s(self) -> float:
        """Seconds that a step takes at least where every sequence crosses."""
        once_bytes = self.global_batch * self.message_bytes
        crossing_bytes = once_bytes + min(self.tied_bytes, once_bytes)
        return crossing_bytes / self.bytes_per_s if self.bytes_per_s else inf

    def most_sequences(self, step_s: float) -> float:
        """Return what the side that is not home can do, in whole sequences."""
        crossing_bytes = self.bytes_per_s * step_s
        if crossing_bytes >= self.gradient_bytes:
            return self.global_batch
        most = crossing_bytes**2 / (4 * self.message_bytes * self.gradient_bytes)
        return min(most, self.global_batch)


def cuts_of(request: PlanRequest) -> list[Cut]:
    """Return the cuts of the network, those first that sequences take longest to
    cross; none if no layer is trained."""
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
    """Return the trained elements of every layer; those that several layers hold count
    for each by an equal share."""
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
    """Return the trained elements of the first layer that the last one uses."""
    paths = {path for module in model.layers[-1].modules for _, path in module.tied}
    return sum(_trained_elements(model, path) for path in paths)


def _trained_elements(model: Model, path: str) -> int:
    """Of the parameter of that full path."""
    owner = next(m for m in model.modules if path.startswith(f"{m.path}."))
    param = abstract_params(owner.unquantised)[path.removeprefix(f"{owner.path}.")]
    return prod(param.shape) if param.trained else 0


def _sides(request: PlanRequest) -> Iterator[frozenset[int]]:
    """One side of every cut: without the first class, or any of one class or zone."""
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
    """What crosses the cut each way, at most: the network cards of either side and the
    links of zones that lie on different sides; links between two nodes come on top."""
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
    """Those that have no link of their own to some of the others: it takes the place
    of cards."""
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
    """What links from some ends to others carry."""
    gbit_per_s = sum(
        link.bandwidth_gbit_per_s
        for link in network.links
        for a, b in (link.between, link.between[::-1])
        if a in one and b in other
    )
    return gbit_per_s * 1e9 / 8
