# SPDX-License-Identifier: Apache-2.0
"""Plans side by side: by what is wished, and with a node more or fewer.

Owns what is searched to compare. Does not own a search (`find.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

from hetjax.cluster.cluster import Cluster, Node, part_of
from hetjax.errors import NoFeasiblePlan
from hetjax.planner.model.deadline import TimeUp, check_deadline, deadline, left_s
from hetjax.planner.model.objectives import Objective, Wish
from hetjax.planner.model.request import NodeClass, Request
from hetjax.planner.search.find import Search
from hetjax.planner.search.incumbents import TellProgress


def every_wish(objective: Objective) -> tuple[Objective, ...]:
    """Return an objective for every wish, within the same limits."""
    return tuple(replace(objective, wish=wish) for wish in get_args(Wish))


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """Another cluster and the best step on it; None where nothing fits."""

    name: str
    step_time_s: float | None
    tokens_per_s: float | None


def what_if(request: Request, progress: TellProgress) -> Iterator[WhatIf]:
    """Yield the best step as things are, and with a node of each class more or fewer.

    Local search is left out: read the figures against the first one. Fewer of them
    where the time is up (`model/deadline.py`).
    """
    cases = list(_clusters(request))
    for n, (name, cluster) in enumerate(cases):
        try:
            with deadline(left_s() / (len(cases) - n)):
                yield _what_if(name, replace(request, cluster=cluster), progress)
        except TimeUp:
            return


def what_if_names(request: Request) -> list[str]:
    """Return the names of the clusters that `what_if` looks at."""
    return [name for name, _ in _clusters(request)]


def _what_if(name: str, request: Request, progress: TellProgress) -> WhatIf:
    check_deadline()
    search = Search(request, [Objective()], lambda line: progress(f"{name}: {line}"))
    try:
        search.propose()
    except NoFeasiblePlan:
        return WhatIf(name=name, step_time_s=None, tokens_per_s=None)
    best = search.found()[0].best
    return WhatIf(
        name=name,
        step_time_s=best.simulation.step_time_s,
        tokens_per_s=best.tokens_per_s,
    )


def _clusters(request: Request) -> Iterator[tuple[str, Cluster]]:
    yield "as it is", request.cluster
    for nodes in request.classes:
        yield f"one more {nodes.name} node", _with(request.cluster, _one_more(nodes))
    for nodes in request.classes:
        gone = nodes.nodes[-1].name
        left = [n.name for n in request.cluster.nodes if n.name != gone]
        if left:
            yield f"one {nodes.name} node fewer", part_of(request.cluster, left)


def _one_more(nodes: NodeClass) -> Node:
    return replace(nodes.nodes[-1], name=f"{nodes.nodes[-1].name}-more")


def _with(cluster: Cluster, node: Node) -> Cluster:
    """The cluster with a node that has the links of the one that it is like."""
    twin = node.name.removesuffix("-more")
    links = [
        replace(link, between=_renamed(link.between, twin, node.name))
        for link in cluster.links
        if twin in link.between
    ]
    return replace(
        cluster, nodes=(*cluster.nodes, node), links=(*cluster.links, *links)
    )


def _renamed(ends: tuple[str, str], old: str, new: str) -> tuple[str, str]:
    one, other = (new if end == old else end for end in ends)
    return one, other
