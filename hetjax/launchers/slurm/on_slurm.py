# SPDX-License-Identifier: Apache-2.0
"""Defines the launcher `slurm`: workers in a Slurm job, an `srun` each.

Owns which nodes the job has, also if it has several components, and the arguments of
`srun`. Does not own parsing Slurm's output (`hetjax/cluster/slurm_nodes.py`), the job's
script (`job_script.py`), notices of a preemption (`end_notice.py`), nor where a worker
is started (`on_machines.py`).

A worker ignores SIGTERM. Slurm sends it to all processes of a job that is to end. The
controller, which gets it too, saves before the workers go.
"""

import os
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from hetjax.cluster.cluster import Cluster
from hetjax.cluster.local_devices import LocalDevice
from hetjax.cluster.machines import Machine, cluster_of_machines
from hetjax.cluster.slurm_nodes import (
    SlurmNode,
    addresses_of_nodes,
    gpus_of,
    job_parts,
    machines_of,
)
from hetjax.errors import BadInput
from hetjax.launchers.launcher import Launcher, LaunchRequest, RunOnNode
from hetjax.launchers.local_processes import WorkerPlace
from hetjax.launchers.on_machines import (
    OnMachines,
    looked_at,
    number_of,
    runner,
)
from hetjax.launchers.slurm.end_notice import LISTENS, end_noticed
from hetjax.launchers.slurm.slurm_commands import slurm_output

_DEAF = ("sh", "-c", 'trap "" TERM; exec "$@"', "sh")


def open_launcher(request: LaunchRequest, stack: ExitStack) -> Launcher:
    """Make the launcher `slurm`.

    Raises BadInput outside of a job, or if a node has no machine in it.
    """
    job = SlurmJob()
    launcher = OnMachines(request, job, stack)
    stack.enter_context(end_noticed(job.listening()))
    return launcher


def find_cluster(hosts: Path | None) -> Cluster:
    """Return the cluster of the job's nodes."""
    return cluster_of_machines("slurm", SlurmJob().machines(looks=True))


def run_on_nodes(cluster: Cluster, hosts: Path | None) -> RunOnNode:
    """Return a function that runs a module on a node of the job."""
    return runner(SlurmJob(), cluster)


class SlurmJob:
    """The job that this process is in; BadInput if it is in none."""

    system, controller = "the Slurm job", ""
    fix = (
        "request the nodes of the cluster file (hetjax launch slurm does), or leave "
        "--cluster out: the job's nodes are then the cluster"
    )
    unreached = fix

    def __init__(self) -> None:
        job = os.environ.get("SLURM_JOB_ID", "")
        if not job.isdecimal():
            raise BadInput(
                got="a process outside of a Slurm job"
                + (f" (SLURM_JOB_ID={job})" if job else ""),
                allowed="a process in an allocation by sbatch or salloc",
                fix="hetjax launch slurm CLUSTER.toml -- train PRESET ... submits a "
                "job that trains; salloc --nodes=2 COMMAND runs a command, hetjax "
                "doctor --slurm say, in an allocation of two nodes",
            )
        if shutil.which("srun") is None:
            raise BadInput(
                got="no srun on this machine",
                allowed="a machine with Slurm's commands",
                fix="add the folder of Slurm's commands to PATH",
            )
        self._job = job
        self._nodes: dict[str, SlurmNode] = {}
        self._seen: dict[str, list[LocalDevice]] = {}

    def machines(self, looks: bool) -> list[Machine]:
        nodes = _nodes_of(self._job)
        self._nodes |= {node.name: node for node in nodes}
        if looks:
            self._look([n for n in nodes if n.gpus and n.name not in self._seen])
        return machines_of(nodes, self._seen)

    def seen(self, machine: Machine) -> Sequence[LocalDevice]:
        return self._seen.get(machine.whole, ())

    def place(self, machine: Machine, variables: Mapping[str, str]) -> WorkerPlace:
        node = self._nodes[machine.whole]
        set_there = [f"{name}={value}" for name, value in variables.items()]
        return WorkerPlace(
            prefix=(*self._step(node), *_DEAF, "env", *set_there),
            python=sys.executable,
            address=number_of(machine.address),
        )

    def listening(self) -> list[str]:
        """Return the command of a step that waits for the job's end.

        It runs on the node of this process, or on the first node.
        """
        here = os.environ.get("SLURMD_NODENAME", "")
        node = self._nodes.get(here) or next(iter(self._nodes.values()))
        return [*self._step(node), *LISTENS]

    def _step(self, node: SlurmNode) -> list[str]:
        """Return the words before a command that make it a step on a node."""
        component = [f"--het-group={node.component}"] * (node.component is not None)
        return [
            *("srun", f"--jobid={self._job}", *component),
            *("--nodes=1", "--ntasks=1", f"--nodelist={node.name}"),
            # beside other steps, with all resources of the job there
            *("--overlap", "--cpu-bind=none", "--mpi=none"),
            *("--unbuffered", "--export=ALL"),
        ]

    def spelled(self, word: str) -> str:
        return word

    def _look(self, nodes: Sequence[SlurmNode]) -> None:
        """Probe cards; if a node does not answer, warn and use what Slurm says."""
        found = looked_at(self, [_unseen(node) for node in nodes])
        for name, cards in found.items():
            self._seen[name] = [] if isinstance(cards, str) else cards
            if not self._seen[name]:
                why = cards if isinstance(cards, str) else "none found"
                warnings.warn(
                    f"the GPUs of {name} cannot be probed ({why}): using what Slurm "
                    "reports",
                    stacklevel=2,
                )


def _unseen(node: SlurmNode) -> Machine:
    """Return the machine of a node that was not probed, whatever it has."""
    return Machine(id=node.name, address=node.address, device="cpu", count=1)


def _nodes_of(job: str) -> list[SlurmNode]:
    """Query which nodes of the job are up; return them in the job's order."""
    parts = job_parts(slurm_output(["scontrol", "show", "job", "-d", "-o", job]))
    if not parts:
        raise BadInput(
            got=f"Slurm job {job} without nodes",
            allowed="a running job",
            fix=f"check its state: scontrol show job {job}",
        )
    held = {
        name: gpus_of(gres)
        for part in parts
        for nodes, gres in part.gres
        for name in _names(nodes)
    }
    component = {name: p.component for p in parts for name in _names(p.nodes)}
    asked = ",".join(component)
    up = addresses_of_nodes(slurm_output(["scontrol", "show", "node", "-o", asked]))
    return [
        SlurmNode(
            name=name, component=number, address=up[name], gpus=held.get(name, ())
        )
        for name, number in component.items()
        if name in up
    ]


def _names(nodes: str) -> list[str]:
    """Expand Slurm's short form of names."""
    if "[" not in nodes and "," not in nodes:
        return [nodes]
    return slurm_output(["scontrol", "show", "hostnames", nodes]).split()
