# SPDX-License-Identifier: Apache-2.0
"""Reads the output of Slurm's `scontrol` on a job and its nodes.

Owns the reading, and which card of the catalogue a GRES type of a site may be. Runs
nothing. Does not own the calls of `scontrol` (`slurm/slurm_commands.py`), nor which
machine is which node of a cluster (`machines.py`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hetjax.cluster.catalogue import candidates, canonical_name, catalogue
from hetjax.cluster.local_devices import LocalDevice
from hetjax.cluster.machines import Machine, parts_by_kind
from hetjax.names import is_node

UNTYPED = "GPU"  # name of a GPU that Slurm gives no type and that was not probed
_JOB = re.compile(r"\bJobId=(\d+)")
_COMPONENT = re.compile(r"\bHetJobOffset=(\d+)")
_NODES = re.compile(r"(?<= )NodeList=(\S*)")
_HELD = re.compile(r"(?<= )Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
_GPUS = re.compile(r"(?:^|,)gpu:(?:([^:,()]+):)?(\d+)")
_GONE = {"DOWN", "ERROR", "FAIL", "FUTURE", "UNKNOWN", "NOT_RESPONDING", "POWERED_DOWN"}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPart:
    """One component of a job, or a whole job without components.

    `component` is its number in a heterogeneous job. `gres` has pairs of nodes and the
    generic resources that the job holds on them. Nodes have Slurm's spelling: a[01-03].
    """

    job: str
    component: int | None
    nodes: str
    gres: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmNode:
    """A node of the job; `gpus` are types and numbers, the type empty if Slurm names
    none."""

    name: str
    component: int | None
    address: str
    gpus: tuple[tuple[str, int], ...] = ()


def job_parts(output: str) -> list[JobPart]:
    """Read `scontrol show job -d -o`: a line for each component. Components without
    nodes are left out."""
    found = []
    for line in output.splitlines():
        job, component = _JOB.search(line), _COMPONENT.search(line)
        nodes = _NODES.search(line)
        if job and nodes and nodes[1] not in ("", "(null)"):
            found.append(
                JobPart(
                    job=job[1],
                    component=int(component[1]) if component else None,
                    nodes=nodes[1],
                    gres=tuple(_HELD.findall(line)),
                )
            )
    return found


def addresses_of_nodes(output: str) -> dict[str, str]:
    """Read `scontrol show node -o`: the addresses of nodes that are up, by name."""
    found = {}
    for line in output.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        name, state = fields.get("NodeName"), fields.get("State", "")
        if name and not state.endswith("*") and _GONE.isdisjoint(state.split("+")):
            found[name] = fields.get("NodeAddr", name)
    return found


def gpus_of(gres: str) -> tuple[tuple[str, int], ...]:
    """Read the GRES of a job: types and numbers of GPUs.

    >>> gpus_of("gpu:a100:2(IDX:0-1),gpu:t4:1(IDX:2),shard:4"), gpus_of("gpu:8")
    ((('a100', 2), ('t4', 1)), (('', 8),))
    """
    return tuple((kind, int(number)) for kind, number in _GPUS.findall(gres))


def kind_of_gres(kind: str) -> str:
    """Return the catalogue's name of a site's GRES type. If it may mean several, return
    the one with the least memory; if none, the type itself.

    >>> kind_of_gres("l4"), kind_of_gres("a100"), kind_of_gres("own-chip")
    ('L4', 'A100-SXM4-40GB', 'own-chip')
    """
    name = canonical_name(kind or UNTYPED)
    several = [] if name in catalogue() else candidates(name)
    return min(several, key=lambda n: catalogue()[n].memory_gib, default=name)


def may_be(kind: str, device: str) -> bool:
    """Return whether a site that calls cards `kind` may mean the catalogue's `device`.

    >>> may_be("a100", "A100-SXM4-80GB"), may_be("t4", "A100-SXM4-80GB")
    (True, False)
    """
    return canonical_name(device) in {canonical_name(kind), *candidates(kind)}


def machines_of(
    nodes: Iterable[SlurmNode],
    seen: Mapping[str, Sequence[LocalDevice]] = MappingProxyType({}),
) -> list[Machine]:
    """Return the nodes as machines, in parts if they have unlike GPUs.

    Devices `seen` on a node, by name, take precedence over Slurm's types.
    """
    found = []
    for node in nodes:
        if seen.get(node.name):
            number = sum(number for _, number in node.gpus)
            whole = _machine(node, node.name, "cpu", number)
            found += parts_by_kind(whole, seen[node.name])
        else:
            found += _as_named(node)
    return found


def _as_named(node: SlurmNode) -> list[Machine]:
    several = len(node.gpus) > 1
    return [
        _machine(node, f"{node.name}/{kind}" if several else node.name, device, number)
        for kind, number in node.gpus
        for device in [kind_of_gres(kind)]
    ] or [_machine(node, node.name, "cpu", 1)]


def _machine(node: SlurmNode, id_: str, device: str, number: int) -> Machine:
    named = (node.name,) if is_node(node.name) else ()
    return Machine(
        id=id_, address=node.address, device=device, count=number, named=named
    )
