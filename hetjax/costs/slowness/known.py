# SPDX-License-Identifier: Apache-2.0
"""Defines known slowness for planning: factors, their file, the slower cluster.

Owns these. Does not own the detection (`detector.py`), the writing of the file
(`training/observers/slow_devices.py`) nor the planning.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.cluster.ranges import RATE
from hetjax.costs.slowness.step_times import Ends
from hetjax.errors import BadInput
from hetjax.files.parsing import json_value, parsed, read_file
from hetjax.files.tables import read_record
from hetjax.files.writing import write_whole
from hetjax.plans.worker_map import node_of

VERSION = 1
_DEVICES: tuple[str, ...] = (
    "products",
    "attention",
    "memory",
    "launches",
    "layers",
)  # of `Speeds`
_MOST = 1e4
_FIX = "remove the file: the run writes a new one"


@dataclass(frozen=True, slots=True)
class Slowness:
    """Factors on times, by node and by the workers at the ends of a link.

    >>> Slowness((("l4-0", 1.9),)).factor("l4-0")
    1.9
    """

    nodes: tuple[tuple[str, float], ...] = ()
    links: tuple[tuple[str, str, float], ...] = ()

    def factor(self, node: str) -> float:
        """Return the factor of a node; 1 if it is not slow."""
        return dict(self.nodes).get(node, 1.0)

    def applied(self, cluster: Cluster) -> Cluster:
        """Return the cluster with the speeds of its slow nodes and links reduced.

        All devices of a node count as slow as its slowest. Links that the cluster does
        not name stay unchanged.
        """
        if not (self.nodes or self.links):
            return cluster
        return replace(
            cluster,
            nodes=tuple(self._slower(node) for node in cluster.nodes),
            links=tuple(self._narrower(link, cluster) for link in cluster.links),
        )

    def _slower(self, node: Node) -> Node:
        if (factor := self.factor(node.name)) == 1.0:
            return node
        slow: dict[str, float] = dict.fromkeys(_DEVICES, 1 / factor)
        return replace(node, speeds=node.speeds.scaled(slow))

    def _narrower(self, link: Link, cluster: Cluster) -> Link:
        known = {node.name: node.zone for node in cluster.nodes}
        factors = [
            factor
            for *workers, factor in self.links
            if (ends := [*map(node_of, workers)])
            and known.keys() >= {*ends}
            and {*link.between} in ({*ends}, {known[end] for end in ends})
        ]
        if not factors:
            return link
        gbit_per_s = RATE.nearest(link.bandwidth_gbit_per_s / max(factors))
        return replace(link, bandwidth_gbit_per_s=gbit_per_s)


AS_IT_SHOULD_BE = Slowness()


def slowness(nodes: Mapping[str, float], links: Mapping[Ends, float]) -> Slowness:
    """Return these factors as `Slowness`, in the order of names."""
    return Slowness(
        nodes=tuple(sorted(nodes.items())),
        links=tuple(sorted((*ends, factor) for ends, factor in links.items())),
    )


def read_slowness(path: Path) -> Slowness:
    """Read the file, if there is one; a BadInput error starts with the path."""
    if not path.exists():
        return AS_IT_SHOULD_BE
    return read_file(path, parse_slowness, what="file of slow devices")


def parse_slowness(text: str) -> Slowness:
    """Read the JSON text; BadInput says where the error is."""
    allowed = "JSON: one object with version, nodes and links"
    raw = parsed(text, json_value, what="JSON", allowed=allowed, fix=_FIX)
    values = read_record(
        raw,
        where="",
        required={"version": "an integer", "nodes": "a list", "links": "a list"},
    )
    if values["version"] != VERSION:
        raise BadInput(
            got=f"version {values['version']}", allowed=f"{VERSION}", fix=_FIX
        )
    nodes = _rows(values["nodes"], "nodes", ("name",))
    links = _rows(values["links"], "links", ("from", "to"))
    return Slowness(
        nodes=tuple((row[0], row[1]) for row in nodes),
        links=tuple((row[0], row[1], row[2]) for row in links),
    )


def _rows(rows: Iterable[object], where: str, names: tuple[str, ...]) -> list[tuple]:
    found = []
    for raw in rows:
        required = dict.fromkeys(names, "a string") | {"factor": "a number"}
        row = read_record(raw, where=where, required=required)  # pyright: ignore
        if not 1 / _MOST <= row["factor"] <= _MOST:
            raise BadInput(
                got=f"{where}: factor = {row['factor']}",
                allowed=f"{1 / _MOST:g} to {_MOST:g}",
                fix=_FIX,
            )
        found.append((*(row[name] for name in names), row["factor"]))
    return found


def write_slowness(path: Path, known: Slowness) -> None:
    """Write a file that `read_slowness` reads back as the same."""
    write_whole(path, slowness_json(known))


def slowness_json(known: Slowness) -> str:
    """Return the JSON text that `parse_slowness` reads back as the same."""
    nodes = [{"name": name, "factor": factor} for name, factor in known.nodes]
    links = [{"from": a, "to": b, "factor": factor} for a, b, factor in known.links]
    values = {"version": VERSION, "nodes": nodes, "links": links}
    return json.dumps(values, indent=1) + "\n"
