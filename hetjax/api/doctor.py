# SPDX-License-Identifier: Apache-2.0
"""Looking for what is wrong: `diagnose`; and a measured node table for a cluster file.

Owns the public functions. Does not own the questions and checks (`hetjax/diagnosis/`)
nor the measuring (`profiling/probe.py`).
"""

from collections.abc import Sequence
from pathlib import Path

from hetjax.cluster.cluster_files import cluster_toml
from hetjax.diagnosis.checks import diagnosis
from hetjax.diagnosis.gathering import Scope, gather
from hetjax.diagnosis.machine_checks import findings_of_machines
from hetjax.diagnosis.machines import look_at_machines
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
    """Look at this machine, and at what is named: a finding each, problems with a fix.

    `cluster` is a cluster file, `run_dir` the directory of a run that is to start,
    `cloud` a checkpoint store, `endpoint` its server if that is not the provider's,
    `ports` those that have to be free here, `peers` are
    other machines, HOST:PORT, where `hetjax doctor --listen PORT` runs. `ssh` is a file
    of hosts, and `slurm` the job that this process is in: each of their machines is
    looked at, too, and whether all are alike, reach this one, and see `run_dir`. Every
    question is given up after some seconds, those to other machines after two minutes;
    JAX is started in processes of its own. Nothing is left behind.

    BadInput for a bad file of hosts, and outside of a job.

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
    machines = [
        finding
        for reach in reaches
        for finding in findings_of_machines(look_at_machines(reach, of_run))
    ]
    return Diagnosis((*here.findings, *machines))


def measured_nodes() -> str:
    """Measure each kind of device here, up to 20 s each; return a cluster file's TOML.

    Starts JAX. BadInput if a kind cannot be measured.
    """
    from hetjax.mesh.accelerators import start_jax  # JAX takes a second
    from hetjax.profiling.found_here import measured_here

    return cluster_toml(measured_here(start_jax()))
