# SPDX-License-Identifier: Apache-2.0
"""Workers that are killed while they train: the run ends as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hetjax.preempt import main as preempt
from hetjax.train import main
from hetjax.training.rundir import LOGS
from tests.training.small import events, lines
from tests.training.test_workers import (
    command,
    environment,
    losses,
    processes_of,
    set_environment,
)

__all__ = ["environment"]

TWELVE_STEPS = ["--launcher", "processes", "--steps", "12", "--checkpoint.every", "0"]
ONE_REPLICA = {
    "version": 1,
    "model": "tiny",
    "seq_len": 64,
    "global_batch": 8,
    "schedule": "1f1b",
    "replicas": [
        {
            "num_microbatches": 4,
            "microbatch_size": 2,
            "stages": [
                {"node": "left", "devices": [0], "layers": [0, 3], "launch_ahead": 2},
                {"node": "right", "devices": [0], "layers": [3, 6], "launch_ahead": 1},
            ],
        }
    ],
}
TWO_NODES = """
name = "pair"
[[node]]
name = "left"
device = "A100-SXM4-80GB"
count = 1
[[node]]
name = "right"
device = "H20"
count = 1
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What the preset's run tells where nobody is lost."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patched:
        set_environment(patched)
        options = command(folder / "run", folder / "cache", *TWELVE_STEPS)
        subprocess.run([sys.executable, "-m", "hetjax.train", *options], check=True)
    return losses(folder / "run")


@contextmanager
def started(options: list[str], until: str) -> Iterator[subprocess.Popen[str]]:
    """A run that has said a line that begins so; killed if it should not end."""
    run = subprocess.Popen(
        [sys.executable, "-m", "hetjax.train", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.stdout is not None
    seen = []
    for line in run.stdout:
        seen.append(line)
        if line.startswith(until) and "val_loss" not in line:
            break
    else:
        pytest.fail("".join(seen))
    try:
        yield run
    finally:
        run.kill()
        run.wait()


def killed(
    run_dir: Path, options: list[str], worker: str, after: str
) -> tuple[int, str]:
    """Train, kill a worker once a line begins with `after`; exit code and output."""
    with started(options, after) as run:
        log = (run_dir / LOGS / f"{worker}.log").resolve()
        (victim,) = (
            pid
            for pid in processes_of(run_dir)
            if Path(f"/proc/{pid}/fd/1").resolve() == log
        )
        os.kill(victim, signal.SIGKILL)
        told, _ = run.communicate(timeout=120)
    return run.returncode, told


def metrics(run_dir: Path) -> list[dict]:
    return lines(run_dir / "metrics.jsonl")


@pytest.mark.usefixtures("environment")
def test_with_a_replica_left_no_step_is_lost_and_every_number_is_the_same(
    tmp_path: Path, whole: list[float]
):
    cache, run_dir = (tmp_path / name for name in ("cache", "run"))
    options = command(run_dir, cache, *TWELVE_STEPS)
    code, told = killed(run_dir, options, "v100-0", "step  1")
    assert code == 0, told
    assert losses(run_dir) == whole
    (recovered,) = events(run_dir, "recovered")
    assert "v100-0" in recovered["reason"] and recovered["lost_steps"] == 0
    # layers 3 to 5 with their two moments, from the other replica's memory
    assert recovered["bytes"].keys() == {"peer"} and recovered["bytes"]["peer"] > 0
    assert not processes_of(run_dir)


@pytest.mark.usefixtures("environment")
def test_without_a_replica_it_goes_on_from_the_newest_checkpoint(tmp_path: Path):
    cache, run_dir, whole = (tmp_path / name for name in ("cache", "run", "whole"))
    plan, cluster = tmp_path / "plan.json", tmp_path / "pair.toml"
    plan.write_text(json.dumps(ONE_REPLICA))
    cluster.write_text(TWO_NODES)
    same = ["--launcher", "processes", "--steps", "12", "--global-batch", "8"]
    same += ["--plan", str(plan), "--cluster", str(cluster)]
    options = command(run_dir, cache, *same)
    code, told = killed(run_dir, options, "left", "step  1")
    assert code == 0, told
    assert main(command(whole, cache, *same)) == 0
    assert losses(run_dir) == losses(whole)
    (recovered,) = events(run_dir, "recovered")
    assert recovered["step"] % 2 == 0 and recovered["bytes"].keys() <= {"disk"}


@pytest.mark.usefixtures("environment")
def test_recovery_none_ends_the_run_and_names_the_worker(tmp_path: Path):
    run_dir = tmp_path / "run"
    same = ["--launcher", "processes", "--steps", "12", "--recovery", "none"]
    options = command(run_dir, tmp_path / "cache", *same)
    code, told = killed(run_dir, options, "h20-0", "step  1")
    assert code == 1
    assert "got: worker 'h20-0'" in told and "from the last checkpoint" in told
    assert "Traceback" not in told
    assert not processes_of(run_dir)


@pytest.mark.usefixtures("environment")
def test_a_node_that_is_asked_to_leave_hands_over_and_the_others_go_on(
    tmp_path: Path, whole: list[float]
):
    cache, run_dir = (tmp_path / name for name in ("cache", "run"))
    # planned at once: twelve steps are soon over
    options = command(run_dir, cache, *TWELVE_STEPS, "--planner", "even")
    with started(options, "step  1") as run:
        assert preempt([str(run_dir), "--node", "a100-0"]) == 0
        told, _ = run.communicate(timeout=120)
    assert run.returncode == 0, told
    assert losses(run_dir) == pytest.approx(whole, rel=1e-5)
    (recovered,) = events(run_dir, "recovered")
    assert recovered["lost_steps"] == 0
    plan = json.loads((run_dir / "plan.json").read_text())
    nodes = {stage["node"] for r in plan["replicas"] for stage in r["stages"]}
    assert nodes and "a100-0" not in nodes
    assert 'name = "a100-0"' not in (run_dir / "cluster.toml").read_text()


@pytest.mark.usefixtures("environment")
def test_a_node_that_is_added_to_the_cluster_file_takes_part(tmp_path: Path):
    cache, run_dir, whole = (tmp_path / name for name in ("cache", "run", "whole"))
    cluster, small = tmp_path / "pair.toml", tmp_path / "one.toml"
    small.write_text(TWO_NODES.rpartition("[[node]]")[0])
    cluster.write_text(small.read_text())
    same = ["--launcher", "processes", "--steps", "12", "--global-batch", "8"]
    same += ["--planner", "even"]
    options = command(run_dir, cache, *same, "--cluster", str(cluster))
    with started(options, "step  1") as run:
        cluster.write_text(TWO_NODES)
        told, _ = run.communicate(timeout=120)
    assert run.returncode == 0, told
    alone = command(whole, cache, *same[2:], "--cluster", str(small))
    assert main(alone) == 0
    assert losses(run_dir) == pytest.approx(losses(whole), rel=1e-5)
    (recovered,) = events(run_dir, "recovered")
    assert recovered["lost_steps"] == 0
    plan = json.loads((run_dir / "plan.json").read_text())
    nodes = {stage["node"] for r in plan["replicas"] for stage in r["stages"]}
    assert nodes == {"left", "right"}


@pytest.mark.usefixtures("environment")
def test_cloud_only_takes_everything_from_the_store(tmp_path: Path):
    run_dir, store = tmp_path / "run", tmp_path / "store"
    (tmp_path / "plan.json").write_text(json.dumps(ONE_REPLICA))
    (tmp_path / "pair.toml").write_text(TWO_NODES)
    same = ["--launcher", "processes", "--steps", "40", "--global-batch", "8"]
    same += ["--plan", f"{tmp_path}/plan.json", "--cluster", f"{tmp_path}/pair.toml"]
    same += ["--recovery", "cloud-only", "--checkpoint.cloud", store.as_uri()]
    with started(command(run_dir, tmp_path / "cache", *same), "step  1") as run:
        while not list(store.glob("step_*/COMMIT")):
            assert run.poll() is None
            time.sleep(0.05)
        os.kill(min(processes_of(run_dir)), signal.SIGKILL)
        told, _ = run.communicate(timeout=120)
    assert run.returncode == 0, told
    (recovered,) = events(run_dir, "recovered")
    assert recovered["step"] > 0 and recovered["bytes"]["cloud"] > 0
    steps = [line["step"] for line in metrics(run_dir) if "loss" in line]
    assert steps == list(range(1, 41))
