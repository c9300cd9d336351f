# SPDX-License-Identifier: Apache-2.0
"""Reads and writes cluster files (TOML), and the preset files.

Owns the keys of the file and their types, and the check that links join its zones:
nodes of one zone share a network, different zones need links. Does not own the other
conditions (`cluster.py`) nor routes (`hetjax/costs/network/routes.py`).
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.errors import BadInput, did_you_mean
from hetjax.files.parsing import parsed, read_file, toml_table
from hetjax.files.tables import as_kind, is_in_files, read_fields, read_record

_PRESETS = Path(__file__).parent / "presets"


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file, or the preset of that name.

    A file takes precedence over a preset of the same name. Links have to join its
    zones. Raises BadInput, which starts with the path.

    >>> [f"{node.count} x {node.device}" for node in load_cluster("tiny").nodes]
    ['1 x A100-SXM4-80GB', '2 x V100-SXM2-16GB', '2 x L4']
    """
    if _is_word(str(path)) and not os.path.exists(path):
        path = preset_path(str(path))
    return read_file(path, _parse_joined, what="cluster file")


def read_cluster(path: Path) -> Cluster:
    """Read a run's cluster; zones may lack links that went with lost nodes."""
    return read_file(path, parse_cluster, what="cluster file")


def _parse_joined(text: str) -> Cluster:
    cluster = parse_cluster(text)
    _check_joined(cluster)
    return cluster


def _check_joined(cluster: Cluster) -> None:
    """Raise BadInput, with lines to add, if a zone has no link to another zone."""
    zone_of = {node.name: node.zone for node in cluster.nodes}
    zones = list(dict.fromkeys(zone_of.values()))
    ends = [[zone_of.get(end, end) for end in link.between] for link in cluster.links]
    joined = {zone for pair in ends for zone in pair if pair[0] != pair[1]}
    alone = [zone for zone in zones if zone not in joined]
    if len(zones) == 1 or not alone:
        return
    nodes = {
        zone: [name for name, its in zone_of.items() if its == zone] for zone in zones
    }
    raise BadInput(
        got="; ".join(f"{_named(zone)} ({', '.join(nodes[zone])})" for zone in alone)
        + ": no link to any other zone",
        allowed="zones that a [[link]] joins, or one zone for all nodes",
        fix=_to_join(zones, alone, nodes[""] if "" in zones else ()),
    )


def _to_join(
    zones: Sequence[str], alone: Sequence[str], zoneless: Sequence[str]
) -> str:
    same = "remove all zone lines, if the nodes share one network"
    if zoneless:
        return f"{same}; else add a zone to {', '.join(zoneless)}, and links to it"
    pairs = [pair for pair in combinations(zones, 2) if {*pair} & {*alone}]
    lines = "; ".join(
        f'[[link]], between = ["{left}", "{right}"], bandwidth_gbit_per_s = 5.0, '
        "latency_ms = 30.0"
        for left, right in pairs
    )
    return f"{same}; else add, one item per line and with figures of your own: {lines}"


def _named(zone: str) -> str:
    return f"zone {zone!r}" if zone else "nodes without a zone"


def parse_cluster(text: str) -> Cluster:
    """Read the TOML text of a cluster. Raises BadInput, which names the place."""
    raw = parsed(
        text,
        toml_table,
        what="TOML",
        allowed="TOML: name, then [[node]] and [[link]] tables",
        fix="correct the file there",
    )
    values = read_record(
        raw,
        where="",
        required={"name": "a string"},
        optional={"node": "a list", "link": "a list"},
    )
    return Cluster(
        name=values["name"],
        nodes=tuple(
            Node(**read_fields(node, Node, where=f"node[{i}]"))
            for i, node in enumerate(values.get("node", []))
        ),
        links=tuple(
            _link(link, f"link[{i}]") for i, link in enumerate(values.get("link", []))
        ),
    )


def cluster_toml(cluster: Cluster) -> str:
    """Return the TOML text that reads back as the same cluster."""
    lines = [f"name = {_toml(cluster.name)}"]
    for node in cluster.nodes:
        given = {
            key: getattr(node, key)
            for key, field in Node.__dataclass_fields__.items()
            if is_in_files(field) and getattr(node, key) != field.default
        }
        lines += ["", "[[node]]", *_assignments(given)]
    for link in cluster.links:
        lines += ["", "[[link]]", *_assignments(asdict(link))]
    return "\n".join(lines) + "\n"


def preset_names() -> list[str]:
    """Return the names of the cluster files that come with the package."""
    return sorted(path.stem for path in _PRESETS.glob("*.toml"))


def preset_path(name: str) -> Path:
    """Return the path of a cluster file that comes with the package."""
    names = preset_names()
    if name not in names:
        raise BadInput(
            got=f"cluster {name!r}, which is neither a file nor a preset",
            allowed=f"a cluster file, or one of {', '.join(names)}",
            fix=did_you_mean(name, names),
        )
    return _PRESETS / f"{name}.toml"


def _is_word(path: str) -> bool:
    """Return whether `path` may be a preset's name: it has no folder and no suffix."""
    return len(Path(path).parts) == 1 and "." not in path


def _link(raw: object, where: str) -> Link:
    values = read_fields(raw, Link, where=where)
    ends = values.pop("between")
    if len(ends) != 2:
        raise BadInput(
            got=f"{where}.between with {len(ends)} names",
            allowed="two names of nodes or of zones",
            fix='write between = ["east", "west"]',
        )
    left, right = (as_kind(end, "a string", where=f"{where}.between") for end in ends)
    return Link(between=(left, right), **values)


def _assignments(values: dict[str, Any]) -> list[str]:
    return [f"{key} = {_toml(value)}" for key, value in values.items()]


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # JSON's strings, numbers and booleans are valid TOML, except for a bare DEL
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
