# SPDX-License-Identifier: Apache-2.0
"""Trains with `hetjax.train`, each worker in a control group with a share of a core.

Owns the groups, the move of workers into them at their first step (they compile before,
at full speed), and the run's options. Does not own the plans nor what is measured. All
workers talk over loopback; a testbed with shaped links is in `hosts.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from experiments.testbed.cpu_quota import (
    find_controller,
    limits,
    make_group,
    remove_group,
)
from experiments.testbed.hosts import JOIN
from hetjax.cluster.cluster import Cluster
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.plans.plan import Plan
from hetjax.plans.plan_files import write_plan
from hetjax.plans.worker_map import node_of
from hetjax.runtime.execution.commit import StepCommit
from hetjax.train import main as train
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.rundir import EVENTS, METRICS
from hetjax.training.recovery.driver import Driver

_SHARES = 8192  # of CPU time, eight times those of another process
_TEXT = Path(__file__).parents[2] / "LICENSE"
_OPTIONS = (
    "--launcher processes --evaluation.every 0 --evaluation.num-batches 1".split()
)
_OPTIONS += "--evaluation.sample-tokens 0 --checkpoint.every 0".split()


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """Groups of processes, and the percent of a core that each has."""

    groups: Mapping[str, Path]
    percents: Mapping[str, float]

    def allow(self, host: str, share: float) -> None:
        """Give a host this share of its usual CPU time."""
        for file, text in limits(1, self.percents[host] * share).items():
            (self.groups[host] / file).write_text(text)

    def prefix(self, host: str) -> list[str]:
        """Return the words before a command that run it on this host."""
        return ["sh", "-c", JOIN, str(self.groups[host] / "cgroup.procs")]

    def take(self, host: str, pid: int) -> None:
        """Put a process, and all that it starts, on this host."""
        (self.groups[host] / "cgroup.procs").write_text(str(pid))


@contextmanager
def hosts(percents: Mapping[str, float]) -> Iterator[Hosts]:
    """Make a group for each host, with that many percent of a core."""
    controller = find_controller()
    assert controller is not None and controller.version == 1, "cgroup v1, as root"
    groups = dict[str, Path]()
    try:
        for host, percent in percents.items():
            name = f"hetjax-placed-{host}"
            groups[host] = make_group(controller, name, percent)
            (groups[host] / "cpu.shares").write_text(str(_SHARES))
        yield Hosts(groups=groups, percents=percents)
    finally:
        for group in groups.values():
            remove_group(group)


def run(
    folder: Path,
    cluster: Cluster,
    plan: Plan,
    on: Hosts,
    *options: str,
    steps: int,
    at: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Train, calling `at` before each step; return the seconds of all steps."""
    folder.mkdir(exist_ok=True)
    (folder / "cluster.toml").write_text(cluster_toml(cluster))
    write_plan(folder / "plan.json", plan)
    step, placed = Driver.step, set[int]()

    def placed_step(driver: Driver, number: int, *, traced: bool = False) -> StepCommit:
        for worker, pid in driver.pids.items():
            if pid not in placed:
                on.take(node_of(worker), pid)
                placed.add(pid)
        at(number + 1)
        return step(driver, number, traced=traced)

    command = [plan.model, "--run-dir", str(folder / "run"), "--steps", "1000"]
    command += ["--stop-after", str(steps), "--seq-len", str(plan.seq_len)]
    command += ["--global-batch", str(plan.global_batch)]
    command += ["--data.path", str(folder / "text.txt")]
    command += ["--data.cache-dir", str(folder.parent / "cache")]
    command += ["--cluster", str(folder / "cluster.toml")]
    command += ["--plan", str(folder / "plan.json")]
    (folder / "text.txt").write_text(_TEXT.read_text())
    with patch.object(Driver, "step", placed_step):
        assert train([*command, *_OPTIONS, *options]) == 4
    lines = read_journal(folder / "run" / METRICS)
    return [line["step_time_s"] for line in lines if "loss" in line]


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the events of this name of the run in this folder."""
    return [e for e in read_journal(folder / "run" / EVENTS) if e["event"] == name]
