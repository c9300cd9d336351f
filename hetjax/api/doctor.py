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
from hetjax.report.diagnosis import Diagnosis


def diagnose(
    *,
    cluster: str | Path | None = None,
    run_dir: str | Path | None = None,
    cloud: str | None = None,
    endpoint: str | None = None,
    ports: Sequence[int] = (),
    peers: Sequence[str] = (),
) -> Diagnosis:
    """Look at this machine, and at what is named: a finding each, problems with a fix.

    `cluster` is a cluster file, `run_dir` the directory of a run that is to start,
    `cloud` a checkpoint store, `endpoint` its server if that is not the provider's,
    `ports` those that have to be free here, `peers` are
    other machines, HOST:PORT, where `hetjax doctor --listen PORT` runs. Every question
    is given up after some seconds; JAX is started in a process of its own. Nothing is
    left behind.

    >>> diagnose(peers=["127.0.0.1:1"]).problems >= 1
    True
    """
    return diagnosis(
        gather(
            Scope(
                cluster=None if cluster is None else Path(cluster),
                run_dir=None if run_dir is None else Path(run_dir),
                cloud=cloud,
                endpoint=endpoint,
                ports=tuple(ports),
                peers=tuple(peers),
            )
        )
    )


def measured_nodes() -> str:
    """Measure each kind of device here, up to 20 s each; return a cluster file's TOML.

    Starts JAX. BadInput if a kind cannot be measured.
    """
    from hetjax.mesh.accelerators import start_jax  # JAX takes a second
    from hetjax.profiling.found_here import measured_here

    return cluster_toml(measured_here(start_jax()))
