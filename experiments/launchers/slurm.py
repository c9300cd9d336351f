# SPDX-License-Identifier: Apache-2.0
"""Runs training on a real Slurm of this machine, and disturbs it.

`python -m experiments.launchers.slurm FOLDER [--kills N]` prints a line of JSON for
each disturbance: workers and clients killed, a node down, the notice before the time
limit, a job of higher priority, scancel. `--only preempted` runs that one alone, after
the undisturbed run. Needs root and Debian's Slurm (`own_slurm.py`); `hetjax launch
slurm` submits the jobs.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from experiments.launchers.own_slurm import GRACE_S, own_slurm, slurm
from experiments.launchers.trial import (
    WORKER,
    events,
    kill,
    losses,
    report,
    settings,
    wait_for,
    wait_for_step,
    written,
)
from tests.launchers.fake_programs import processes

_REVOKED_S = 3.0  # sooner, a node refuses the credential of a start that has just ended


def submitted(folder: Path, run_dir: Path, *options: str, nodes: str = "fast old"):
    """Submit a run; return its job."""
    cluster, plan = written(folder, *nodes.split())
    words = [sys.executable, "-m", "hetjax.launch", "slurm", str(cluster)]
    words += ["--cpus-per-device", "1", *options, "--", "train"]
    words += settings(folder, run_dir, plan)
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


def ended(job: str) -> str:
    """Wait for the end of a job; return Slurm's name for its state."""

    def state() -> str:
        told = slurm("scontrol", "show", "job", "-o", job).split()
        return next(w.partition("=")[2] for w in told if w.startswith("JobState="))

    going = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED")
    wait_for(f"job {job}", lambda: state() not in going)
    return state()


def workers_on(node: str) -> list[int]:
    return processes(["-m", WORKER], f"SLURMD_NODENAME={node}\0")


def clients_of(node: str) -> list[int]:
    """Return the ids of an srun and of its sibling, which ends the step if it dies."""
    return sorted(processes(["srun", f"--nodelist={node}"]))


def go_on(job: str) -> None:
    """Let a requeued job start at once, rather than in two minutes."""

    def waits() -> bool:
        return {*slurm("squeue", "-h", "-o", "%T").split()} == {"PENDING"}

    wait_for("a requeue", waits)
    time.sleep(_REVOKED_S)
    slurm("scontrol", "update", f"jobid={job}", "StartTime=now")


def killed(
    folder: Path, name: str, whole: dict[int, float], victims: Callable[[], list[int]]
) -> None:
    """Run a job and kill some of its processes at a step."""
    run_dir, begun_s = folder / name / "run", time.monotonic()
    run_dir.parent.mkdir()
    job = submitted(folder, run_dir)
    wait_for_step(run_dir)
    number = kill(victims())
    state = ended(job)
    wall_s = round(time.monotonic() - begun_s, 1)
    report(name, run_dir, whole, state=state, killed=number, wall_s=wall_s)


def down(folder: Path, whole: dict[int, float]) -> None:
    """Take a component's only node down: Slurm ends the job, and starts it again."""
    run_dir = folder / "down" / "run"
    run_dir.parent.mkdir()
    job = submitted(folder, run_dir)
    wait_for_step(run_dir, 30)
    slurm("scontrol", "update", "nodename=old", "state=down", "reason=trial")
    go_on(job)
    report("node down, two components", run_dir, whole, state=ended(job))


def down_alone(folder: Path, whole: dict[int, float]) -> None:
    """Take down one node of a job without components: others go on (--no-kill)."""
    run_dir = folder / "alone" / "run"
    run_dir.parent.mkdir()
    cluster, plan = written(folder, "small", "fast")
    text = cluster.read_text().replace("A100-SXM4-40GB", "cpu").replace("T4", "cpu")
    cluster.write_text(text)
    words = [sys.executable, "-m", "hetjax.launch", "slurm", str(cluster)]
    words += ["--cpus-per-device", "1", "--sbatch", "nodelist=small,fast", "--"]
    words += ["train", *settings(folder, run_dir, plan)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    job = done.stdout.split()[-1]
    wait_for_step(run_dir)
    told = slurm("scontrol", "show", "job", "-o", job).split()
    host = next(w.partition("=")[2] for w in told if w.startswith("BatchHost="))
    (other,) = {"small", "fast"} - {host}
    slurm("scontrol", "update", f"nodename={other}", "state=down", "reason=trial")
    report("node down, no components", run_dir, whole, state=ended(job), gone=other)


def noticed(folder: Path, whole: dict[int, float]) -> None:
    """Send the notice before the time limit; the job is requeued."""
    run_dir = folder / "notice" / "run"
    run_dir.parent.mkdir()
    job = submitted(folder, run_dir)
    wait_for_step(run_dir)
    slurm("scancel", "--batch", "--signal=USR1", job)
    go_on(job)
    report("notice, requeued", run_dir, whole, state=ended(job))


def preempted(folder: Path, whole: dict[int, float]) -> None:
    """A job of higher priority takes the nodes: the run saves as the grace begins, and
    resumes after that job."""
    run_dir = folder / "preempted" / "run"
    run_dir.parent.mkdir()
    job = submitted(folder, run_dir)
    wait_for_step(run_dir)
    begun_s = time.monotonic()
    other = slurm("sbatch", "--parsable", *_OTHER)
    wait_for("the other job", lambda: other in slurm("squeue", *_RUNNING).split())
    freed_s = round(time.monotonic() - begun_s, 1)
    ended(other)
    go_on(job)
    state = ended(job)
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    steps = {e["event"]: e["step"] for e in map(json.loads, lines) if "step" in e}
    report(
        "preempted",
        run_dir,
        whole,
        state=state,
        freed_s=freed_s,
        grace_s=GRACE_S,
        saved_at=steps["preempted"],
        resumed_at=steps["restored"],
    )


_OTHER = ("--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null")
_OTHER += ("--wrap=sleep 3",)
_RUNNING = ("--noheader", "--states=RUNNING", "--format=%i")


def cancelled(folder: Path, whole: dict[int, float]) -> None:
    """Cancel: the run saves within KillWait; another job resumes it."""
    run_dir = folder / "cancel" / "run"
    run_dir.parent.mkdir()
    job = submitted(folder, run_dir)
    wait_for_step(run_dir)
    slurm("scancel", job)
    state = ended(job)
    told = events(run_dir)
    again = ended(submitted(folder, run_dir))
    report("scancel", run_dir, whole, state=state, told=told, again=again)


SCENARIOS = {
    "notice": noticed,
    "preempted": preempted,
    "cancel": cancelled,
    "down": down,
    "alone": down_alone,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--only", choices=SCENARIOS, nargs="+")
    given = parser.parse_args()
    folder = given.folder.absolute()
    with own_slurm(folder / "slurm"):
        run_dir = folder / "whole" / "run"
        run_dir.parent.mkdir()
        state = ended(submitted(folder, run_dir))
        whole = losses(run_dir)
        report("undisturbed", run_dir, whole, state=state)
        assert state == "COMPLETED", state
        for number in range(0 if given.only else given.kills):
            killed(folder, f"worker {number}", whole, lambda: workers_on("old"))
            killed(folder, f"srun {number}", whole, lambda: clients_of("old")[:1])
            killed(folder, f"both srun {number}", whole, lambda: clients_of("old"))
        for name in given.only or SCENARIOS:
            SCENARIOS[name](folder, whole)


if __name__ == "__main__":
    main()
