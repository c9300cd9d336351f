# SPDX-License-Identifier: Apache-2.0
"""Six steps of preset `tiny` on two nodes, with disturbances between steps."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.plans.plan_files import read_plan, write_plan
from hetjax.runtime.execution.commit import StepCommit
from hetjax.training.directory.rundir import LOGS
from hetjax.training.recovery.driver import Driver
from tests.training.small import lines
from tests.training.test_workers import command

SEQ_LEN = 16
NODES = ("left", "right")
STEPS = range(1, 7)
EVERY = 2  # steps between disturbances
PATIENCE_S, STARTED_S = 30.0, 300.0

ONE_NODE = """
name = "pair"
[[node]]
name = "left"
device = "A100-SXM4-80GB"
count = 1
"""
TWO_NODES = f"""{ONE_NODE}
[[node]]
name = "right"
device = "H20"
count = 1
"""


def stage(node: str, layers: tuple[int, int], ahead: int) -> Stage:
    return Stage(node=node, devices=(0,), layers=layers, launch_ahead=ahead)


def plan(*pipelines: tuple[Stage, ...]) -> Plan:
    count = 4 // len(pipelines)
    replicas = tuple(
        Replica(num_microbatches=count, microbatch_size=2, stages=stages)
        for stages in pipelines
    )
    return Plan(model="tiny", seq_len=SEQ_LEN, global_batch=8, replicas=replicas)


# a whole model on each node; half a model on each node
TWO_REPLICAS = plan((stage("left", (0, 6), 1),), (stage("right", (0, 6), 1),))
ONE_REPLICA = plan((stage("left", (0, 3), 2), stage("right", (3, 6), 1)))


def on_nodes(
    run_dir: Path, cache: Path, *options: str, cluster: str = TWO_NODES
) -> list[str]:
    """Return the command line for a cluster file beside the run's directory."""
    file = run_dir.parent / "pair.toml"
    file.write_text(cluster)
    same = ["--launcher", "processes", "--cluster", str(file)]
    same += ["--steps", str(len(STEPS)), "--global-batch", "8"]
    same += ["--seq-len", str(SEQ_LEN), "--evaluation.sample-tokens", "0"]
    return command(run_dir, cache, *same, *options)


def training(
    run_dir: Path, cache: Path, *options: str, of: Plan = TWO_REPLICAS
) -> list[str]:
    """Return the command line with a plan file, too."""
    file = run_dir.parent / "pair-plan.json"
    write_plan(file, of)
    return on_nodes(run_dir, cache, "--plan", str(file), *options)


def between_steps(patched: pytest.MonkeyPatch, *actions: Callable[[], object]) -> None:
    """Call one action after every `EVERY` steps, while all workers await a request."""
    to_do = list(actions)

    def do_next(done: int) -> None:
        if to_do and done % EVERY == 0:
            to_do.pop(0)()

    after_steps(patched, do_next)


def after_steps(patched: pytest.MonkeyPatch, do: Callable[[int], object]) -> None:
    """Call `do` after each step, with the number of finished steps."""
    step = Driver.step

    def step_and_do(driver: Driver, number: int, *, traced: bool = False) -> StepCommit:
        found = step(driver, number, traced=traced)
        do(number + 1)
        return found

    patched.setattr(Driver, "step", step_and_do)


def wait_until(is_so: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    end_s = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def process_of(run_dir: Path, worker: str) -> int | None:
    """Return the id of the worker's process, which writes to its log."""
    log = (run_dir / LOGS / f"{worker}.log").resolve()
    for entry in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if entry.resolve() == log:
                return int(entry.parts[2])
        except OSError:
            continue
    return None


def kill(run_dir: Path, worker: str) -> None:
    """Kill the worker once it writes to its log; a standby may still be importing."""
    wait_until(lambda: process_of(run_dir, worker), STARTED_S)
    pid = process_of(run_dir, worker)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def trained(run_dir: Path) -> list[int]:
    """Return the steps in metrics.jsonl."""
    return [m["step"] for m in lines(run_dir / "metrics.jsonl") if "loss" in m]


def nodes_of(run_dir: Path) -> set[str]:
    """Return the nodes of the run's current plan."""
    plan = read_plan(run_dir / "plan.json")
    return {stage.node for _, _, stage in plan.stages()}
