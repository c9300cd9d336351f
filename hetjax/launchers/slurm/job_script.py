# SPDX-License-Identifier: Apache-2.0
"""Makes the script of a Slurm job that trains: what it requests, and how it ends.

Owns the text for `sbatch`: a component for each group of like nodes, the notice before
the time limit, and when the job is requeued. Pure: runs, reads and writes nothing. Does
not own options (`hetjax/cli/launch.py`), nor what happens in the job (`on_slurm.py`).
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Cluster
from hetjax.cluster.slurm_nodes import may_be
from hetjax.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGroup:
    """Slurm nodes that are alike: `devices` of one kind on each of them."""

    device: str
    devices: int
    nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTerms:
    """What the job requests besides its nodes.

    Slurm announces the end `notice_s` before the time `limit`, which is in Slurm's own
    form (empty: the partition's limit). `options` are further options of sbatch,
    without dashes. They apply to every component, as `cpus_per_device` does.
    """

    limit: str = ""
    notice_s: int = 300
    cpus_per_device: int = 4
    options: tuple[str, ...] = ()


def groups_of(cluster: Cluster) -> list[NodeGroup]:
    """Return the groups of the cluster's nodes, in the order of its file."""
    counted: dict[tuple[str, int], int] = {}
    for node in cluster.nodes:
        kind = canonical_name(node.device), node.devices_per_host
        counted[kind] = counted.get(kind, 0) + node.hosts
    return [
        NodeGroup(device=device, devices=devices, nodes=nodes)
        for (device, devices), nodes in counted.items()
    ]


def gres_types(
    groups: Sequence[NodeGroup], types: Sequence[str], given: Mapping[str, str]
) -> dict[str, str]:
    """Return what the site calls each kind of card.

    That is the `given` name, else the only one of the site's `types` that may mean the
    card. It is empty (any card) if there is one kind of card and no type. Raises
    BadInput if it is unclear which cards are meant.
    """
    devices = {group.device for group in groups} - {"cpu"}
    said = {canonical_name(device): kind for device, kind in given.items()}
    found = {}
    for device in sorted(devices):
        meant = [kind for kind in types if may_be(kind, device)]
        if device in said:
            found[device] = said[device]
        elif len(meant) == 1:
            found[device] = meant[0]
        elif len(devices) == 1 and not types:
            found[device] = ""
        else:
            raise BadInput(
                got=f"{device}, for which Slurm has "
                f"{' and '.join(meant) or 'no known name'}",
                allowed=f"one type of GPU for each device; Slurm reports: "
                f"{', '.join(types) or 'none, or it does not answer'}",
                fix=f"name the type: --gres {device}=TYPE, as sinfo -o %G shows it",
            )
    return found


def job_script(
    groups: Sequence[NodeGroup],
    types: Mapping[str, str],
    terms: JobTerms,
    command: Sequence[str],
    run_dir: Path,
    directory: Path,
) -> str:
    """Return the script that trains by this command, from this directory.

    The job's output goes beside the run's directory, which begins empty.
    """
    output = str(run_dir.absolute()).replace("%", "%%") + ".slurm-%j.out"
    first = [
        f"--job-name={shlex.quote(f'hetjax-{run_dir.name}')}",
        f"--output={shlex.quote(output)}",
        "--open-mode=append",
        f"--signal=B:USR1@{terms.notice_s}",
    ]
    lines = [f"#SBATCH {option}" for option in first]
    for number, group in enumerate(groups):
        lines += ["#SBATCH hetjob"] if number else []
        lines += [f"#SBATCH {option}" for option in _asked(group, types, terms)]
    return _SCRIPT.format(
        options="\n".join(lines),
        directory=shlex.quote(str(directory)),
        command=shlex.join(command),
    )


def _asked(group: NodeGroup, types: Mapping[str, str], terms: JobTerms) -> list[str]:
    """Return the options of one component."""
    options = [f"--nodes={group.nodes}", "--ntasks-per-node=1"]
    options += [f"--cpus-per-task={terms.cpus_per_device * group.devices}"]
    if group.device != "cpu":
        parts = ["gpu", types[group.device], str(group.devices)]
        options.append(f"--gres={shlex.quote(':'.join(filter(None, parts)))}")
    options += [f"--time={terms.limit}"] if terms.limit else []
    # a lost node does not end a job that has others of its kind
    options += ["--requeue", "--no-kill"]
    return options + [f"--{shlex.quote(option)}" for option in terms.options]


_SCRIPT = """#!/bin/bash
{options}

# USR1 comes before the time limit: the run saves and ends with code 4, and the job goes
# back into the queue. The same if another job preempts this one (143: before the first
# step). TERM comes from scancel: the run saves and ends.
cd {directory} || exit
asked= ending= heard=1 run=
trap 'asked=1; heard=1; [ -z "$run" ] || kill -TERM "$run"' USR1
trap 'ending=1; heard=1; [ -z "$run" ] || kill -TERM "$run"' TERM
{command} &
run=$!
while [ -n "$heard" ]; do
    heard=
    wait "$run"
    code=$?
done
if [ -n "$asked" ] && [ "$code" = 4 ]; then
    echo "saved before the time limit: back into the queue"
    scontrol requeue "$SLURM_JOB_ID" && exit
fi
if [ -z "$ending" ] && {{ [ "$code" = 4 ] || [ "$code" = 143 ]; }} &&
    scontrol show job -o "$SLURM_JOB_ID" | grep -q " PreemptTime=[0-9]"; then
    echo "saved for a job of higher priority: back into the queue"
    scontrol requeue "$SLURM_JOB_ID" && exit
fi
exit "$code"
"""
