# SPDX-License-Identifier: Apache-2.0
"""Faults that the lower bound once had, to be injected: tests must detect them.

Owns the faults. Does not own the tests (`test_bound_fuzz.py`,
`experiments/planner/bound_fuzz.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.network.nearest import LinkEnd, Nearest
from hetjax.costs.network.routes import ring_card_bytes_per_s, route
from hetjax.costs.network.wire_bytes import lane_share
from hetjax.planner.model.problem import Floats, Option, Problem
from hetjax.planner.model.request import NodeClass, PlanRequest
from hetjax.planner.model.terms import terms

Fault = Callable[[], AbstractContextManager[Any]]


def _first_two_nodes(
    first: NodeClass, second: NodeClass, linked: object
) -> Iterator[tuple[Node, Node]]:
    for other in second.nodes[:2]:
        if other.name != first.nodes[0].name:
            yield first.nodes[0], other
            return


def _first_devices(
    network: Cluster, rates: Mapping[str, float], source: LinkEnd, target: LinkEnd
) -> Nearest | None:
    same = source.node.name == target.node.name
    begin = source.num_devices if same else 0
    if begin + target.num_devices > target.node.count:
        return None
    out = source.node.name, tuple(range(source.num_devices))
    into = target.node.name, tuple(range(begin, begin + target.num_devices))
    way = route(network, out, into)
    share = lane_share(network, out, into, target.tensor)
    slowest = min(rates[trunk] for trunk in way.trunks)
    return Nearest(latency_s=way.latency_s, s_per_byte=share / slowest)


def _first_rings(node: Node, *, num_rings: int, devices_per_ring: int) -> float:
    starts = range(0, num_rings * devices_per_ring, devices_per_ring)
    rings = [range(start, start + devices_per_ring) for start in starts]
    return ring_card_bytes_per_s(node, rings)


def _shallow(*args: Any, **kwargs: Any) -> Problem:
    return _PROBLEM(*args, **kwargs | {"max_launch_ahead": 16})


def _half_the_rates(request: PlanRequest, options: Sequence[Option]) -> Floats:
    return _RATES(request, options) / 2


def _twice_the_update(*given: Any) -> float:
    return 2 * _UPDATE_S(*given)


def _whole_models(p: Problem) -> float:
    return p.global_batch / float(p.rates_C @ p.devices_C)


_PROBLEM = terms._problem  # noqa: SLF001
_RATES, _UPDATE_S = terms.most_sum_bytes_per_s, terms.option_least_update_s
FAULTS: Mapping[str, Fault] = {
    "links": lambda: patch("hetjax.planner.model.hops._pairs", _first_two_nodes),
    "messages over hosts": lambda: patch(
        "hetjax.planner.model.hops.nearest", _first_devices
    ),
    "tensor groups over hosts": lambda: patch(
        "hetjax.planner.model.terms.time_terms.least_shared_card_bytes_per_s",
        _first_rings,
    ),
    "depth": lambda: patch("hetjax.planner.model.terms.terms._problem", _shallow),
    "sums": lambda: patch.object(terms, "most_sum_bytes_per_s", _half_the_rates),
    "updates": lambda: patch.object(terms, "option_least_update_s", _twice_the_update),
    # found by these tests: whole models at each device's rate, as if no device was
    # better at some of the layers
    "shares of a model": lambda: patch(
        "hetjax.planner.bound.column_generation.compute_bound_s", _whole_models
    ),
}
