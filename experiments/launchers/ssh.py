# SPDX-License-Identifier: Apache-2.0
"""Runs training behind a real sshd of this machine, and kills parts of it.

`python -m experiments.launchers.ssh FOLDER [--kills N]` prints a line of JSON for each
kill: of workers, clients and the controller. Needs root and Debian's openssh-server
(`own_sshd.py`); `hetjax launch ssh` starts the runs.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from experiments.launchers.own_sshd import ADDRESSES, own_sshd
from experiments.launchers.trial import (
    WORKER,
    kill,
    losses,
    report,
    settings,
    wait_for,
    wait_for_step,
    written,
)
from tests.launchers.fake_programs import processes


def started(folder: Path, run_dir: Path, hosts: Path) -> subprocess.Popen[bytes]:
    run_dir.parent.mkdir(exist_ok=True)
    cluster, plan = written(folder, *ADDRESSES)
    words = [sys.executable, "-m", "hetjax.launch", "ssh", str(hosts), "--", "train"]
    words += [*settings(folder, run_dir, plan), "--cluster", str(cluster)]
    with (run_dir.parent / "output").open("ab") as output:
        return subprocess.Popen(words, stdout=output, stderr=output)


def workers_on(host: str) -> list[int]:
    return processes(["-m", WORKER], f" {ADDRESSES[host]} ")


def clients_of(host: str) -> list[int]:
    return processes(["/usr/bin/ssh", ADDRESSES[host]])


def killed(
    folder: Path,
    name: str,
    hosts: Path,
    whole: dict[int, float],
    victims: Callable[[], list[int]],
) -> None:
    """Run training and kill some of its processes at a step."""
    run_dir, begun_s = folder / name / "run", time.monotonic()
    run = started(folder, run_dir, hosts)
    wait_for_step(run_dir)
    number, code = kill(victims()), run.wait()
    wall_s = round(time.monotonic() - begun_s, 1)
    time.sleep(1.0)
    left = len([*workers_on("left"), *workers_on("right")])
    more = {"code": code, "killed": number, "wall_s": wall_s, "workers_left": left}
    report(name, run_dir, whole, **more)


def controller_killed(folder: Path, hosts: Path, whole: dict[int, float]) -> None:
    """Kill the controller: its workers end, and the same command resumes."""
    run_dir = folder / "controller" / "run"
    run = started(folder, run_dir, hosts)
    wait_for_step(run_dir)
    run.kill()
    run.wait()
    begun_s = time.monotonic()
    wait_for("the workers' end", lambda: not workers_on("left") + workers_on("right"))
    gone_s = round(time.monotonic() - begun_s, 1)
    code = started(folder, run_dir, hosts).wait()
    report("controller", run_dir, whole, code=code, workers_gone_after_s=gone_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=3)
    given = parser.parse_args()
    folder = given.folder.absolute()
    with own_sshd(folder / "sshd") as hosts:
        run_dir = folder / "whole" / "run"
        code = started(folder, run_dir, hosts).wait()
        whole = losses(run_dir)
        report("undisturbed", run_dir, whole, code=code)
        assert code == 0, code
        for number in range(given.kills):
            killed(
                folder, f"worker {number}", hosts, whole, lambda: workers_on("right")
            )
            killed(folder, f"ssh {number}", hosts, whole, lambda: clients_of("right"))
        controller_killed(folder, hosts, whole)


if __name__ == "__main__":
    main()
