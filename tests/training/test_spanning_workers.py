# SPDX-License-Identifier: Apache-2.0
"""`train --launcher processes` with a node of two hosts: the run of one process."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hetjax.cluster.files import load_cluster
from hetjax.plans.files import write_plan
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh
from hetjax.train import main
from hetjax.training import run
from hetjax.training.launching import LOGS, on_this_machine
from tests.training.test_workers import command, environment, losses, processes_of

__all__ = ["environment"]  # a fixture
CLUSTER = """
name = "two"
[[node]]
name = "slice"
device = "H20"
count = 4
hosts = 2
[[node]]
name = "single"
device = "A100-SXM4-80GB"
count = 1
"""
PLAN = Plan(
    model="tiny",
    seq_len=64,
    global_batch=24,
    replicas=(
        Replica(
            num_microbatches=3,
            microbatch_size=8,
            stages=(
                Stage(
                    node="slice",
                    devices=(0, 2, 1, 3),
                    mesh=StageMesh(data=2, tensor=2),
                    layers=(0, 4),
                    launch_ahead=2,
                ),
                Stage(node="single", devices=(0,), layers=(4, 6), launch_ahead=1),
            ),
        ),
    ),
)


@pytest.fixture
def settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: None
) -> list[str]:
    """Options that name the cluster and the plan, the same for both launchers."""
    cluster, plan = tmp_path / "cluster.toml", tmp_path / "plan.json"
    cluster.write_text(CLUSTER)
    write_plan(plan, PLAN)
    nodes = load_cluster(cluster).nodes

    def started(plan: Plan, logs: Path, stack: ExitStack, **given: Any) -> Any:
        return on_this_machine(plan, logs, stack, **(given | {"nodes": nodes}))

    monkeypatch.setattr(run, "on_this_machine", started)
    return ["--cluster", str(cluster), "--plan", str(plan), "--steps", "4"]


def test_runs_go_on_from_two_hosts_to_one_process_and_back(
    tmp_path: Path, settings: list[str]
):
    cache = tmp_path / "cache"
    whole = command(tmp_path / "whole", cache, *settings)
    assert main(whole) == 0
    expected = losses(tmp_path / "whole")
    assert len(expected) == 6
    workers = ["--launcher", "processes"]
    for name, first, then in (("to", workers, []), ("from", [], workers)):
        run_dir = tmp_path / name
        given = command(run_dir, cache, *settings)
        assert main([*given, *first, "--stop-after", "2"]) == 4
        assert main([*given, *then]) == 0
        assert losses(run_dir) == pytest.approx(expected, rel=1e-5)
        assert not processes_of(run_dir)
        left = {log.name for log in (run_dir / LOGS).iterdir()}
        assert left == {"slice@0.log", "slice@1.log", "single.log"}
