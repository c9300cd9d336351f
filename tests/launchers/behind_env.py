# SPDX-License-Identifier: Apache-2.0
"""A third-party launcher: workers behind a command that tells where they are."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hetjax.cluster.cluster import Cluster, Node
from hetjax.launchers.launcher import Launcher, LaunchRequest, RunOnNode
from hetjax.launchers.local_processes import OnThisMachine, WorkerPlace
from hetjax.launchers.table import LauncherRow

ROW = LauncherRow(summary="behind env", module=__name__, finder="the test's")
ADDRESS = "127.0.0.2"


def open_launcher(request: LaunchRequest, stack: ExitStack) -> Launcher:
    workers = [worker for node in request.cluster.nodes for worker in node.workers]
    return OnThisMachine(
        request.logs,
        stack,
        places={
            worker: WorkerPlace(prefix=("env", f"PLACE={worker}"), address=ADDRESS)
            for worker in workers
        },
        module="tests.launchers.telling_worker",
        terms=request.terms,
    )


def find_cluster(hosts: Path | None) -> Cluster:
    return Cluster(name="found", nodes=(Node(name="far", device="cpu", count=1),))


def run_on_nodes(cluster: Cluster, hosts: Path | None) -> RunOnNode:
    def run(node: Node, module: str, argument: str, limit_s: float) -> Any:
        raise AssertionError(f"nobody need look at a {node.device}")

    return run
