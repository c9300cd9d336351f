# SPDX-License-Identifier: Apache-2.0
"""`train --launcher processes` on a node of two hosts equals the run in one process."""

from pathlib import Path

import pytest

from hetjax.plans.plan import Plan, Replica, Stage, StageMesh
from hetjax.plans.plan_files import write_plan
from hetjax.train import main
from hetjax.training.directory.rundir import LOGS
from tests.training.test_workers import command, losses, processes_of

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
def settings(tmp_path: Path, environment: None) -> list[str]:
    """Options that name the cluster and the plan, the same for both launchers."""
    cluster, plan = tmp_path / "cluster.toml", tmp_path / "plan.json"
    cluster.write_text(CLUSTER)
    write_plan(plan, PLAN)
    said = ["--cluster", str(cluster), "--plan", str(plan), "--steps", "6"]
    return [*said, "--global-batch", str(PLAN.global_batch)]


@pytest.mark.nightly
def test_a_run_goes_on_from_two_hosts_to_one_process_and_back(
    tmp_path: Path, settings: list[str]
):
    cache, run_dir, whole = (tmp_path / name for name in ("cache", "run", "whole"))
    assert main(command(whole, cache, *settings)) == 0
    given, workers = command(run_dir, cache, *settings), ["--launcher", "processes"]
    assert main([*given, *workers, "--stop-after", "2"]) == 4
    assert not processes_of(run_dir)
    assert main([*given, "--stop-after", "2"]) == 4
    assert main([*given, *workers]) == 0
    assert losses(run_dir) == pytest.approx(losses(whole), rel=1e-5)
    assert len(losses(whole)) == 8
    assert not processes_of(run_dir)
    left = {log.name for log in (run_dir / LOGS).iterdir()}
    assert left == {"slice@0.log", "slice@1.log", "single.log"}
