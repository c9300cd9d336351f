# SPDX-License-Identifier: Apache-2.0
"""A Ray machine with two unlike cards, which Ray mistakes for two of one kind."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hetjax.launchers import on_ray
from hetjax.launchers.on_ray import OnRay, find_cluster, run_on_nodes
from hetjax.runtime.rpc.worker_connections import WorkerLost
from hetjax.runtime.worker.bootstrap import WorkerBootstrap
from tests.launchers.cards import UUIDS, put_cards

SEEN = "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION", "NCCL_DEBUG"
FOLDER = "RAY_TEST_CARDS"  # a variable


def tell(bootstrap: WorkerBootstrap) -> None:
    """Replace a worker: write down what it would see, and leave."""
    shown = [os.environ.get(name) for name in SEEN]
    (Path(os.environ[FOLDER]) / f"{bootstrap.worker}.json").write_text(
        json.dumps(shown)
    )


def test_the_cards_of_a_machine_are_two_nodes_whose_workers_see_one_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from ray.cluster_utils import Cluster

    put_cards(tmp_path / "driver", monkeypatch)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(on_ray, "_ENTRY", f"{__name__}:tell")
    head: dict[str, Any] = {
        "num_cpus": 1,
        "num_gpus": 2,
        "object_store_memory": 80 << 20,
        "resources": {"accelerator_type:GeForce-RTX-3090": 1},
    }
    machine = Cluster(initialize_head=True, head_node_args=head)
    try:
        monkeypatch.setenv("RAY_ADDRESS", str(machine.address))
        cluster = find_cluster(None)
        assert [(n.device, n.count) for n in cluster.nodes] == [
            ("GeForce-RTX-3090", 1),
            ("GeForce-RTX-4090", 1),
        ]
        run = run_on_nodes(cluster, None)
        told = [
            json.loads(run(node, "tests.launchers.telling_variables", "", 60.0).stdout)
            for node in cluster.nodes
        ]
        assert [variables[SEEN[0]] for variables in told] == [*UUIDS]
        with pytest.raises(subprocess.TimeoutExpired):
            run(cluster.nodes[0], "http.server", "0", 3.0)
        with ExitStack() as stack:
            launcher = OnRay(cluster, stack, simulate=False, discovered=True)
            names = [node.name for node in cluster.nodes]
            for name in names:
                with pytest.raises(WorkerLost, match="has left"):
                    launcher.start([name])
        told = [json.loads((tmp_path / f"{name}.json").read_text()) for name in names]
        assert told == [[uuid, "0.92", "INFO"] for uuid in UUIDS]
    finally:
        import ray

        ray.shutdown()
        machine.shutdown()
