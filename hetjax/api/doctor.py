# SPDX-License-Identifier: Apache-2.0
"""Finds problems of machines (`diagnose`), and measures nodes for a cluster file.

Owns the public functions. Does not own the facts and checks (`hetjax/diagnosis/`) nor
the measuring (`profiling/probe.py`).
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hetjax.cluster.cluster import Cluster
from hetjax.cluster.cluster_files import cluster_toml, load_cluster
from hetjax.diagnosis.checks import diagnosis
from hetjax.diagnosis.gathering import Scope, gather
from hetjax.diagnosis.machine_checks import findings_of_machines
from hetjax.diagnosis.machines import look_at_machines
from hetjax.errors import BadInput
from hetjax.launchers.on_machines import Reach
from hetjax.launchers.over_ssh import SshHosts
from hetjax.launchers.slurm.on_slurm import SlurmJob
from hetjax.report.diagnosis import Diagnosis


def diagnose(
    *,
    cluster: str | Path | None = None,
    run_dir: str | Path | None = None,
    cloud: str | None = None,
    endpoint: str | None = None,
    ports: Sequence[int] = (),
    peers: Sequence[str] = (),
    ssh: str | Path | None = None,
    slurm: bool = False,
) -> Diagnosis:
    """Check this machine and all that the arguments name; problems come with a fix.

    `cluster` is a cluster file, `run_dir` the directory of a run that will start,
    `cloud` a checkpoint store, and `endpoint` its server if that is not the provider's.
    `ports` must be free here. `peers` are other machines, each HOST:PORT, on which
    `hetjax doctor --listen PORT` runs. `ssh` is a file of hosts; `slurm` stands for the
    nodes of the Slurm job that this process is in. Each of these machines is checked,
    too: also whether it matches this machine, reaches it, and sees and writes
    `run_dir`, and whether there is one for each node of `cluster`.

    Each check has a timeout of some seconds, each check of another machine one of two
    minutes. JAX starts in separate processes. Nothing is left behind.

    Raises BadInput for a bad file of hosts, and for `slurm` outside a job.

    >>> diagnose(peers=["127.0.0.1:1"]).problems >= 1
    True
    """
    of_run = None if run_dir is None else Path(run_dir)
    reaches: list[Reach] = [SshHosts(Path(ssh))] if ssh is not None else []
    reaches += [SlurmJob()] if slurm else []
    here = diagnosis(
        gather(
            Scope(
                cluster=None if cluster is None else Path(cluster),
                run_dir=of_run,
                cloud=cloud,
                endpoint=endpoint,
                ports=tuple(ports),
                peers=tuple(peers),
            )
        )
    )
    nodes = _cluster_of(cluster) if reaches else None
    machines = [
        finding
        for reach in reaches
        for finding in findings_of_machines(look_at_machines(reach, of_run, nodes))
    ]
    return Diagnosis((*here.findings, *machines))


def _cluster_of(file: str | Path | None) -> Cluster | None:
    """Return the cluster of a file, or None if it is bad: `gather` reports that."""
    with suppress(BadInput):
        return None if file is None else load_cluster(Path(file))


def measured_nodes() -> str:
    """Measure each kind of device here, up to 20 s each; return a cluster file's TOML.

    Starts JAX. Raises BadInput if a kind cannot be measured.
    """
    from hetjax.mesh.accelerators import start_jax  # JAX takes a second
    from hetjax.profiling.found_here import measured_here

    return cluster_toml(measured_here(start_jax()))
