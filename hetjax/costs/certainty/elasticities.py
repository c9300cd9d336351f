# SPDX-License-Identifier: Apache-2.0
"""Computes how much a predicted time depends on each parameter of the model of time.

Owns the elasticities of a predicted step, and of times that depend on one kind of
device. Does not own the parameters (`cluster/speeds.py`) nor their uncertainty
(`beliefs.py`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.cluster.ranges import RATE
from hetjax.cluster.speeds import PARAMETERS

# the kind of device and the name of a speed, or the ends of a link and `LINK`
Parameter = tuple[str, str]
Elasticities = Mapping[Parameter, float]
Work = tuple[str, str]  # a kind of device and a kind of action: ("L4", "FB")
LINK = "link"
SOFTWARE: Parameter = ("", "software")  # scales all times alike
OVERHEAD: Parameter = ("", "overhead")  # scales steps alone, not the work in them

_STEP = 1.25  # factor on speeds: large, as beliefs are wider and maxima have kinks
_LEAST = 1e-6  # least slope that counts


def elasticities(
    predict: Callable[[Cluster], float], cluster: Cluster, *, together: bool = False
) -> Elasticities:
    """Return -d log(time) / d log(speed) of `predict` at the cluster, by parameter.

    Parameters without effect are left out. `predict` returns seconds on a cluster of
    the same nodes and links at other speeds. If it is slow, use `together`: all kinds
    of device vary at once, and each gets an equal part of the effect. Times that a
    profile has measured already include the software.
    """
    found: dict[Parameter, float] = {}
    for parameters in _varied(cluster, together):
        slow = predict(_at_speeds(cluster, parameters, 1 / _STEP))
        fast = predict(_at_speeds(cluster, parameters, _STEP))
        share = _share(slow, fast)
        if abs(share) > _LEAST:
            found |= dict.fromkeys(parameters, share / len(parameters))
    return {OVERHEAD: 1.0, **_with_software(found)}


def work_elasticities(
    predict: Callable[[Cluster], Mapping[Work, float]], cluster: Cluster
) -> dict[Work, Elasticities]:
    """Return the elasticities of the times of work that `predict` returns.

    Work depends on its own kind of device alone, so each speed is varied for all kinds
    at once.
    """
    kinds = {canonical_name(node.device) for node in cluster.nodes}
    found: dict[Work, dict[Parameter, float]] = {}
    for name in PARAMETERS:
        parameters = [(kind, name) for kind in sorted(kinds)]
        slow = predict(_at_speeds(cluster, parameters, 1 / _STEP))
        fast = predict(_at_speeds(cluster, parameters, _STEP))
        for work, slow_s in slow.items():
            share, own = _share(slow_s, fast[work]), found.setdefault(work, {})
            if abs(share) > _LEAST:
                own[work[0], name] = share
    return {work: _with_software(shares) for work, shares in found.items()}


def _share(slow_s: float, fast_s: float) -> float:
    """Return a slope from the times at both ends of a speed's range."""
    return math.log(slow_s / fast_s) / (2 * math.log(_STEP))


def _with_software(shares: Elasticities) -> Elasticities:
    measured = sum(share for (_, name), share in shares.items() if name == "layers")
    return {SOFTWARE: 1.0 - measured, **shares}


def _varied(cluster: Cluster, together: bool) -> list[list[Parameter]]:
    """Return groups of parameters that vary at once."""
    every = list(parameters_of(cluster))
    if not together:
        return [[parameter] for parameter in every]
    by_name: dict[str, list[Parameter]] = {}
    for owner, name in every:
        by_name.setdefault(name, []).append((owner, name))
    return list(by_name.values())


def _at_speeds(
    cluster: Cluster, parameters: Sequence[Parameter], factor: float
) -> Cluster:
    return reduce(lambda c, p: at_speed(c, p, factor), parameters, cluster)


def parameters_of(cluster: Cluster) -> Iterator[Parameter]:
    """Yield the parameters of all kinds of device and of all links of a cluster."""
    for kind in dict.fromkeys(canonical_name(node.device) for node in cluster.nodes):
        yield from ((kind, name) for name in PARAMETERS)
    yield from (_of_link(link) for link in cluster.links)


def at_speed(cluster: Cluster, parameter: Parameter, factor: float) -> Cluster:
    """Return the cluster with one parameter `factor` times as fast."""
    owner, name = parameter

    def faster(node: Node) -> Node:
        if name == LINK or canonical_name(node.device) != owner:
            return node
        return replace(node, speeds=node.speeds.scaled({name: factor}))

    def wider(link: Link) -> Link:
        if _of_link(link) != parameter:
            return link
        gbit_per_s = RATE.nearest(link.bandwidth_gbit_per_s * factor)
        return replace(link, bandwidth_gbit_per_s=gbit_per_s)

    return replace(
        cluster,
        nodes=tuple(map(faster, cluster.nodes)),
        links=tuple(map(wider, cluster.links)),
    )


def _of_link(link: Link) -> Parameter:
    return "-".join(link.between), LINK
