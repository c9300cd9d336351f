# SPDX-License-Identifier: Apache-2.0
"""Every error in a cluster file states what was got, what is allowed, what to type."""

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.cluster_files import load_cluster, parse_cluster
from hetjax.costs.network.routes import route
from hetjax.errors import BadInput
from hetjax.names import RULE

NODE = '[[node]]\nname = "n"\ndevice = "cpu"\ncount = 4\n'
OTHER = '[[node]]\nname = "m"\ndevice = "cpu"\ncount = 1\n'
LINK = '[[link]]\nbetween = ["n", "m"]\nbandwidth_gbit_per_s = 1\n'


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(BadInput) as caught:
        load_cluster("tinny")
    assert caught.value.got == "cluster 'tinny', which is neither a file nor a preset"
    assert caught.value.allowed == "a cluster file, or one of lab, office, tiny"
    assert caught.value.fix == "did you mean 'tiny'?"


@pytest.mark.parametrize(
    ("text", "got", "allowed", "fix"),
    [
        (
            "name = \n",
            "broken TOML: Invalid value (at line 1, column 8)",
            "TOML: name, then [[node]] and [[link]] tables",
            "correct the file there",
        ),
        (
            NODE,
            "the file has no key 'name'",
            "'name' is required and is a string",
            "add 'name' to the file",
        ),
        (
            'name = "x"\nnodes = 3\n',
            "unknown key 'nodes'",
            "keys of the file: name, node, link",
            "did you mean 'node'?",
        ),
        (
            'name = "x"\nzzzzz = 3\n',
            "unknown key 'zzzzz'",
            "keys of the file: name, node, link",
            "remove 'zzzzz'",
        ),
        (
            'name = "x"\n',
            "cluster 'x' with 0 nodes",
            "1 node or more",
            "add a [[node]] with name, device and count",
        ),
        (
            'name = "x"\nnode = "n"\n',
            "node = 'n'",
            "node is a list",
            "write node as a list",
        ),
        (
            'name = "x"\nnode = ["n"]\n',
            "node[0] = 'n'",
            "node[0] is a table",
            "write node[0] as a table",
        ),
        (
            'name = "x"\n' + NODE + "hostss = 2\n",
            "unknown key 'node[0].hostss'",
            "keys of node[0]: name, device, count, hosts, zone, spot, price_per_hour, "
            "preemptions_per_hour, peak_tflops, memory_gib, memory_gb_per_s, "
            "intra_node_gb_per_s, network_gbit_per_s, precision",
            "did you mean 'hosts'?",
        ),
        (
            'name = "x"\n[[node]]\nname = "n"\ndevice = "cpu"\n',
            "node[0] has no key 'count'",
            "'count' is required and is an integer",
            "add 'count' to node[0]",
        ),
        (
            'name = "x"\n[[node]]\nname = "n"\ndevice = "cpu"\ncount = true\n',
            "node[0].count = True",
            "node[0].count is an integer",
            "write node[0].count as an integer",
        ),
        (
            'name = "x"\n' + NODE + 'spot = "yes"\n',
            "node[0].spot = 'yes'",
            "node[0].spot is true or false",
            "write node[0].spot as true or false",
        ),
        (
            'name = "x"\n' + NODE + "memory_gib = inf\n",
            "node[0].memory_gib = inf",
            "node[0].memory_gib is a number",
            "write node[0].memory_gib as a number",
        ),
        (
            'name = "x"\n' + NODE + NODE,
            "2 nodes named 'n'",
            "unique node names",
            "rename all but one of them",
        ),
        (
            'name = "x"\n' + NODE.replace('"n"', '"n 1"'),
            "a node named 'n 1'",
            RULE,
            'write a name such as "a100-0"',
        ),
        (
            'name = "x"\n' + NODE + 'zone = "n"\n',
            "'n' names a node and a zone",
            "different names for nodes and zones, since links use both",
            "rename the zone 'n'",
        ),
        (
            'name = "x"\n' + NODE.replace('"cpu"', '""'),
            "node 'n': device = ''",
            "the name of a device kind",
            'write a device such as "A100-SXM4-80GB" or "cpu"',
        ),
        (
            'name = "x"\n' + NODE.replace("4", "0"),
            "node 'n': count = 0",
            "1 <= count <= 65536",
            "write how many devices the node has, or remove the node",
        ),
        (
            'name = "x"\n' + NODE + "hosts = 3\n",
            "node 'n': 4 devices on hosts = 3",
            "hosts in 1, 2, 4 (equally many devices each)",
            "change hosts, or give the host that differs a [[node]] of its own",
        ),
        (
            'name = "x"\n' + NODE + "price_per_hour = -1\n",
            "node 'n': price_per_hour = -1.0",
            "0 <= price_per_hour <= 1e+06",
            "correct price_per_hour or remove the key",
        ),
        (
            'name = "x"\n' + NODE + "memory_gib = 0\n",
            "node 'n': memory_gib = 0.0",
            "1e-06 <= memory_gib <= 1e+09",
            "correct memory_gib or remove the key",
        ),
        (
            'name = "x"\n' + NODE + 'precision = "fp16"\n',
            "node 'n': precision = fp16",
            "bfloat16, float16, float32",
            "correct precision or remove the key",
        ),
        (
            'name = "x"\n' + NODE + "network_gbit_per_s = -25\n",
            "node 'n': network_gbit_per_s = -25.0",
            "1e-06 <= network_gbit_per_s <= 1e+09",
            "correct network_gbit_per_s or remove the key",
        ),
        (
            'name = "x"\n' + NODE + LINK,
            "no node or zone is named 'm': link between 'n' and 'm'",
            "nodes: n; zones: none",
            "remove this [[link]], or add a [[node]] named 'm'",
        ),
        (
            'name = "x"\n' + NODE + LINK + LINK.replace('"m"', '"z"'),
            "no node or zone is named 'm' or 'z': link between 'n' and 'm'; link "
            "between 'n' and 'z'",
            "nodes: n; zones: none",
            "remove these [[link]]s, or add a [[node]] named 'm' and one named 'z'",
        ),
        (
            'name = "x"\n' + NODE + OTHER + 'zone = "z"\n' + LINK.replace('"m"', '""'),
            "no node or zone is named '': link between 'n' and ''",
            "nodes: m, n; zones: z",
            "remove this [[link]], or give the nodes without a zone one, and name that "
            "in `between`",
        ),
        (
            'name = "x"\n' + NODE + LINK.replace('"m"', '"n"'),
            "link between 'n' and 'n'",
            "two different nodes or two different zones",
            "name two nodes, or two zones, in `between`",
        ),
        (
            'name = "x"\n' + NODE + OTHER + 'zone = "z"\n' + LINK.replace('"m"', '"z"'),
            "link between 'n' and 'z'",
            "two different nodes or two different zones",
            "name two nodes, or two zones, in `between`",
        ),
        (
            'name = "x"\n' + NODE + OTHER + LINK + LINK,
            "a second link between 'n' and 'm'",
            "one link for each pair (it holds in both directions)",
            "remove one of them",
        ),
        (
            'name = "x"\n' + NODE + OTHER + LINK.replace("1", "0"),
            "link between 'n' and 'm': bandwidth_gbit_per_s = 0.0",
            "1e-06 <= bandwidth_gbit_per_s <= 1e+09",
            "write the bandwidth of one direction",
        ),
        (
            'name = "x"\n' + NODE + OTHER + '[[link]]\nbetween = ["n", "m"]\n',
            "link[0] has no key 'bandwidth_gbit_per_s'",
            "'bandwidth_gbit_per_s' is required and is a number",
            "add 'bandwidth_gbit_per_s' to link[0]",
        ),
        (
            'name = "x"\n' + NODE + OTHER + LINK + "latency_ms = -1\n",
            "link between 'n' and 'm': latency_ms = -1.0",
            "0 <= latency_ms <= 1e+06",
            "write the latency of one direction",
        ),
        (
            'name = "x"\n' + NODE + LINK.replace(', "m"', ""),
            "link[0].between with 1 names",
            "two names of nodes or of zones",
            'write between = ["east", "west"]',
        ),
    ],
)
def test_a_bad_cluster_text_is_told_in_three_parts(text, got, allowed, fix):
    with pytest.raises(BadInput) as caught:
        parse_cluster(text)
    assert caught.value.got == got
    assert caught.value.allowed == allowed
    assert caught.value.fix == fix


@pytest.mark.parametrize(
    "name", ["..", ".", "", "a/b", "a\0", "a\n", "-a", "a" * 64, "n\u00f6", "COMMIT"]
)
def test_names_that_could_lead_elsewhere_are_refused_at_every_door(name: str):
    node = Node(name=name, device="cpu", count=1)
    with pytest.raises(BadInput, match="a node named"):
        Cluster(name="x", nodes=(node,))
    written = NODE.replace('"n"', json.dumps(name))
    with pytest.raises(BadInput, match="a node named"):
        parse_cluster(f'name = "x"\n{written}')


def test_errors_of_a_file_start_with_its_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "x"\n')
    with pytest.raises(BadInput, match="mine.toml': cluster 'x' with 0 nodes"):
        load_cluster(path)


def test_a_missing_file_and_a_file_that_is_no_text_are_bad_input(tmp_path):
    with pytest.raises(BadInput, match="gone.toml': No such file or directory"):
        load_cluster(tmp_path / "gone.toml")
    with pytest.raises(BadInput, match="a folder\n.*a plain file\n"):
        load_cluster(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"a\xff")
    with pytest.raises(BadInput, match="not UTF-8 text at byte 1"):
        load_cluster(tmp_path / "binary.toml")


def test_a_cluster_made_in_python_is_checked_too():
    with pytest.raises(BadInput, match="2 nodes named 'a100-0'"):
        Cluster(name="x", nodes=(Node(name="a100-0", device="H20", count=1),) * 2)


def zoned(*zones: str, links: str = "") -> str:
    nodes = (
        NODE.replace('"n"', f'"n{i}"') + (f'zone = "{zone}"\n' if zone else "")
        for i, zone in enumerate(zones)
    )
    return 'name = "x"\n' + "".join(nodes) + links


def between(left: str, right: str) -> str:
    return LINK.replace('"n", "m"', f'"{left}", "{right}"')


@pytest.mark.parametrize(
    ("zones", "links", "alone"),
    [
        (("a", "b", "c"), (), ["zone 'a' (n0)", "zone 'b' (n1)", "zone 'c' (n2)"]),
        (("a", "b", "c", "c"), (("a", "b"),), ["zone 'c' (n2, n3)"]),
        (("a", "b", "b"), (("n1", "n2"),), ["zone 'a' (n0)", "zone 'b' (n1, n2)"]),
    ],
)
def test_zones_that_nothing_joins_are_refused_with_the_lines_to_add(
    zones: tuple[str, ...],
    links: tuple[tuple[str, str], ...],
    alone: list[str],
    tmp_path: Path,
):
    file = tmp_path / "cluster.toml"
    file.write_text(zoned(*zones, links="".join(between(*ends) for ends in links)))
    with pytest.raises(BadInput) as caught:
        load_cluster(file)
    told = caught.value.got.partition("cluster.toml': ")[2]
    assert told == "; ".join(alone) + ": no link to any other zone"
    added = caught.value.fix.partition("figures of your own: ")[2]
    with file.open("a") as more:
        more.write(re.sub(r"; |, (?=between|bandwidth|latency)", "\n", added))
    cluster = load_cluster(file)
    for one, other in combinations(cluster.nodes, 2):  # any two can be used
        route(cluster, (one.name, (0,)), (other.name, (0,)))


def test_zones_that_are_joined_by_zones_or_nodes_or_are_one_are_taken(tmp_path: Path):
    file = tmp_path / "cluster.toml"
    for zones, ends in (
        (("a", "a"), []),
        (("", ""), []),
        (("a", "b"), [("a", "b")]),
        (("a", "b"), [("n0", "n1")]),
    ):
        file.write_text(zoned(*zones, links="".join(between(*each) for each in ends)))
        load_cluster(file)


def test_nodes_without_a_zone_beside_others_with_one_are_refused(tmp_path: Path):
    file = tmp_path / "cluster.toml"
    file.write_text(zoned("a", "", ""))
    with pytest.raises(BadInput, match="nodes without a zone .n1, n2.") as caught:
        load_cluster(file)
    assert "remove all zone lines" in caught.value.fix
    file.write_text(file.read_text().replace('zone = "a"\n', ""))
    load_cluster(file)
