# SPDX-License-Identifier: Apache-2.0
"""`train --launcher ray` on a Ray cluster of local processes, parts of which die."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetjax.cluster.ray_nodes import NAMED
from hetjax.train import main
from tests.training.pair import SEQ_LEN, training
from tests.training.small import events, lines
from tests.training.test_workers import command

STEPS = ["--steps", "2000", "--global-batch", "8", "--seq-len", str(SEQ_LEN)]
# so small that rounding does not grow over the unknown number of steps
STEPS += ["--optimizer.learning-rate", "3e-4"]
AT_ONCE = ["--planner", "even", "--evaluation.sample-tokens", "0"]
MARK = "RAY_TEST_OF"  # in the environment of all processes that a test starts


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head and one more machine, each a set of Ray's processes."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv(MARK, str(os.getpid()))
    cluster = Cluster(initialize_head=True, head_node_args=machine("head"))
    cluster.add_node(**machine("left"))
    monkeypatch.setenv("RAY_ADDRESS", str(cluster.address))
    yield cluster
    cluster.shutdown()


def machine(name: str) -> dict[str, Any]:
    resources = {NAMED + name: 1}
    return {"num_cpus": 1, "resources": resources, "object_store_memory": 80 << 20}


def until(run: subprocess.Popen[str], words: str) -> str:
    """Read lines until one contains these words; return it."""
    assert run.stdout is not None
    seen = []
    for line in run.stdout:
        seen.append(line)
        if words in line:
            return line
    pytest.fail("".join(seen))


def actors() -> list[int]:
    """Return the processes of this test's workers."""
    mark, found = f"{MARK}={os.getpid()}".encode(), []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            is_actor = b"ray::_Worker" in entry.read_bytes()
            if is_actor and mark in (entry.parent / "environ").read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return sorted(found)


def trained(run_dir: Path) -> dict[int, float]:
    """Return the loss of each step."""
    found = lines(run_dir / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in found if "loss" in line}


@pytest.mark.nightly
@pytest.mark.usefixtures("environment")
def test_machines_and_workers_of_ray_come_and_go_while_the_run_goes_on(
    machines: Any, tmp_path: Path, cache: Path
):
    run_dir = tmp_path / "run"
    on_ray = ["--launcher", "ray", "--no-simulate", *AT_ONCE]
    options = command(run_dir, cache, *STEPS, *on_ray)
    run = subprocess.Popen(
        [sys.executable, "-m", "hetjax.train", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        until(run, "step  ")
        right = machines.add_node(**machine("right"))
        until(run, "continuing with right")
        os.kill(actors()[0], signal.SIGKILL)
        until(run, "all are at step")
        machines.remove_node(right, allow_graceful=False)
        while "right" not in until(run, "all are at step"):
            pass  # another recovery may precede it
        until(run, "grad_norm")
        run.send_signal(signal.SIGTERM)
        told, _ = run.communicate(timeout=60)
        assert run.returncode == 4, told
    finally:
        run.kill()
    came, killed, *later = events(run_dir, "recovered")
    assert "with right" in came["reason"] and came["lost_steps"] == 0
    assert killed["started"] and not killed["reason"].startswith("continuing")
    assert any("right" in one["reason"] for one in later)
    replicas = json.loads((run_dir / "plan.json").read_text())["replicas"]
    assert "right" not in {s["node"] for r in replicas for s in r["stages"]}
    steps = trained(run_dir)
    whole = training(tmp_path / "whole", cache, *STEPS, "--stop-after", str(len(steps)))
    assert main(whole) == 4
    assert steps == pytest.approx(trained(tmp_path / "whole"), rel=1e-5)
