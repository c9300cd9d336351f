# SPDX-License-Identifier: Apache-2.0
"""Computes the state that nodes must fetch for a new plan, and how long that takes.

Owns which node sends a layer to which, and the sums over the network's trunks. Does not
own routes (`routes.py`), the choice of the plan (`planner/search/replan.py`) nor the
move itself.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

from hetjax.cluster.cluster import Cluster
from hetjax.costs.network.routes import card, route, trunks
from hetjax.errors import BadInput
from hetjax.models.model import Model, parameter_count
from hetjax.plans.plan import Plan

_STATE_BYTES = 12  # per parameter: master weight and two moments, in fp32
_FIRST = (0,)  # the device whose route stands for those of its node


def fetched_bytes(model: Model, current: Plan, plan: Plan) -> dict[str, float]:
    """Return the bytes of state that every node of the new plan has to fetch.

    A node that holds a layer now has all of its state; a node fetches each missing
    layer once. Frozen parameters are not state: every node reads them from the run's
    initial weights.
    """
    fetched = dict.fromkeys(_held(plan), 0.0)
    for node, layer in _missing(current, plan):
        fetched[node] += _layer_bytes(model, layer)
    return fetched


def fetching_s(model: Model, cluster: Cluster, current: Plan, plan: Plan) -> float:
    """Return the seconds until all nodes of the new plan have fetched their state.

    A layer comes from the node of `cluster` with the widest route that holds it now. If
    no such node is left, only the receiver's network card limits the transfer from a
    store. All transfers begin at once; the fullest trunk decides.
    """
    rates, held = trunks(cluster), _held(current)
    load: Counter[str] = Counter()
    for node, layer in _missing(current, plan):
        holders = [h for h in sorted(held) if h in cluster.names and layer in held[h]]
        ways = [way for h in holders if (way := _way(cluster, h, node))]
        store = (card(cluster.node(node), 0, "in"),)
        best = max(ways, key=lambda way: min(rates[t] for t in way), default=store)
        load.update(dict.fromkeys(best, round(_layer_bytes(model, layer))))
    return max((size / rates[trunk] for trunk, size in load.items()), default=0.0)


def _way(cluster: Cluster, source: str, target: str) -> tuple[str, ...]:
    """Return the trunks from one node to another; none if they cannot reach each
    other."""
    with suppress(BadInput):
        return route(cluster, (source, _FIRST), (target, _FIRST)).trunks
    return ()


def _missing(current: Plan, plan: Plan) -> Iterator[tuple[str, int]]:
    """Yield the nodes of the new plan with the layers that they do not hold now."""
    before = _held(current)
    for node, layers in _held(plan).items():
        for layer in sorted(layers - before.get(node, set())):
            yield node, layer


def _layer_bytes(model: Model, layer: int) -> float:
    return float(_STATE_BYTES * parameter_count(model.layers[layer], trained=True))


def _held(plan: Plan) -> dict[str, set[int]]:
    held: dict[str, set[int]] = {}
    for _, _, stage in plan.stages():
        held.setdefault(stage.node, set()).update(range(*stage.layers))
    return held
