# SPDX-License-Identifier: Apache-2.0
"""Gives a group of processes a share of the CPU, by Linux control groups.

Owns finding the `cpu` controller (version 1 or 2), and a testbed's groups with their
limits and their end. Does not own which processes join (`hosts.py`, `ray_nodes.py`).
"""

import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.testbed import processes

# short, because a quota stops and resumes processes: work that outlasts a few periods
# is merely slower
PERIOD_US = 10_000
GROUP_VARIABLE = "HETJAX_TESTBED_CPU_GROUP"
_LEAST_QUOTA_US = 1_000  # the kernel refuses less
_REMOVAL_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Controller:
    """Where groups with a CPU quota are made."""

    version: Literal[1, 2]
    mount: Path


def find_controller(mounts: str | None = None) -> Controller | None:
    """Return the mounted `cpu` controller, or None if there is none.

    `mounts` is the text of /proc/self/mountinfo (see proc(5)).
    """
    text = Path("/proc/self/mountinfo").read_text() if mounts is None else mounts
    for line in text.splitlines():
        place, _, kind = line.partition(" - ")
        mount = Path(place.split()[4])
        file_system, _, options = kind.split(maxsplit=2)
        if file_system == "cgroup" and "cpu" in options.split(","):
            return Controller(version=1, mount=mount)
        if file_system == "cgroup2" and "cpu" in _words(mount / "cgroup.controllers"):
            return Controller(version=2, mount=mount)
    return None


def limits(version: Literal[1, 2], cpu_percent: float) -> dict[str, str]:
    """Return the text for each file of a group, in the order of writing."""
    period_us = round(max(PERIOD_US, _LEAST_QUOTA_US * 100 / cpu_percent))
    quota_us = round(period_us * cpu_percent / 100)
    if version == 2:
        return {"cpu.max": f"{quota_us} {period_us}"}
    return {"cpu.cfs_period_us": str(period_us), "cpu.cfs_quota_us": str(quota_us)}


def make_group(controller: Controller, name: str, cpu_percent: float) -> Path:
    """Make a group whose processes together get `cpu_percent` of one core."""
    if controller.version == 2:
        # never switched off, because another testbed may rely on it by then
        (controller.mount / "cgroup.subtree_control").write_text("+cpu")
    group = controller.mount / name
    group.mkdir()
    for file, text in limits(controller.version, cpu_percent).items():
        (group / file).write_text(text)
    return group


def members(group: Path) -> set[int]:
    """Return the ids of the processes in a group, none if it is gone."""
    pids = {int(word) for word in _words(group / "cgroup.procs")}
    return {pid for pid in pids if processes.is_alive(pid)}


def join_group() -> None:
    """Put this process into the group that HETJAX_TESTBED_CPU_GROUP names, if any."""
    file = os.environ.get(GROUP_VARIABLE)
    if file:
        Path(file).write_text(str(os.getpid()))


def remove_group(group: Path) -> None:
    """End the processes of a group and remove it; a missing group is no error."""
    end_s = time.monotonic() + _REMOVAL_S
    while group.exists():
        processes.end(lambda: members(group))
        try:
            group.rmdir()
        except OSError as error:  # one has joined, or the last is still ending
            if error.errno != errno.EBUSY or time.monotonic() > end_s:
                raise
            time.sleep(0.01)


def _words(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []
