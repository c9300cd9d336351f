# SPDX-License-Identifier: Apache-2.0
"""Trains for an hour with a fault every 20 seconds, and measures the useful time.

    python -m experiments.recovery.endurance [--minutes 60] [--pause-s 20] [--seed 0]
        [--folder runs/endurance] [--output FILE]

Trains preset `tiny` on worker processes of this machine. Each fault is one of these: a
worker is killed (SIGKILL), stopped for three seconds, or stopped until it counts as
lost; a bit of the newest checkpoint is flipped; a node is removed from the cluster file
until just before the next fault. If the run exits, the same command starts it again,
and its exit code is kept. At the end it is asked to stop (SIGTERM).

Each fault adds a line to the output: the fault, the step, and memory and open
descriptors of the controller and the workers. Prints one JSON object: faults, steps,
recoveries, `goodput` (time in steps that count over all time), exit codes, and the
growth of the controller's memory and descriptors between the medians of the first and
the last quarter of the faults.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from experiments.recovery.kills import events, started, workers
from hetjax.cluster.cluster import Cluster, part_of
from hetjax.cluster.cluster_files import cluster_toml, load_cluster
from hetjax.files.writing import write_whole
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.rundir import CHECKPOINTS, METRICS

_SHORT_S, _LAST_S = 3.0, 120.0
_ENDLESS = 10_000_000  # steps
Line = dict[str, Any]


@dataclass(kw_only=True)
class Attacked:
    """A run, its processes, and the processes that are stopped."""

    folder: Path
    cluster: Cluster
    random_: random.Random
    process: subprocess.Popen[bytes] | None = None
    codes: list[int] = field(default_factory=list[int])
    stopped: set[int] = field(default_factory=set[int])

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def go_on(self) -> None:
        """Start the run unless it is running."""
        if self.process is not None:
            code = self.process.poll()
            if code is None:
                return
            self.codes.append(code)
        self.let_go()
        self.process = started(self._command(), self.folder)

    def _command(self) -> list[str]:
        words = [sys.executable, "-m", "hetjax.train", "tiny", "--launcher"]
        words += ["processes", "--run-dir", str(self.run_dir)]
        words += ["--cluster", str(self.folder / "cluster.toml"), "--simulate"]
        words += ["--steps", str(_ENDLESS), "--optimizer.schedule", "constant"]
        words += ["--optimizer.warmup-steps", "0", "--checkpoint.every", "20"]
        words += ["--evaluation.every", "50", "--evaluation.num-batches", "1"]
        return [*words, "--evaluation.sample-tokens", "0"]

    def let_go(self) -> None:
        """Resume stopped processes and put all nodes back into the cluster file."""
        for pid in self.stopped:
            _signal(pid, signal.SIGCONT)
        self.stopped.clear()
        self.offer(self.cluster)

    def offer(self, cluster: Cluster) -> None:
        write_whole(self.folder / "cluster.toml", cluster_toml(cluster))

    def end(self) -> int | None:
        """Ask the run to stop; return its exit code, or None if it must be killed."""
        assert self.process is not None
        self.process.terminate()
        try:
            return self.process.wait(_LAST_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return None


def kill(run: Attacked) -> str:
    worker, pid = _one_worker(run)
    _signal(pid, signal.SIGKILL)
    return worker


def stop_shortly(run: Attacked) -> str:
    worker, pid = _one_worker(run)
    _signal(pid, signal.SIGSTOP)
    time.sleep(_SHORT_S)
    _signal(pid, signal.SIGCONT)
    return worker


def stop(run: Attacked) -> str:
    worker, pid = _one_worker(run)
    _signal(pid, signal.SIGSTOP)
    run.stopped.add(pid)
    return worker


def damage(run: Attacked) -> str:
    """Flip a bit in one file of the newest checkpoint."""
    try:
        newest = max((run.run_dir / CHECKPOINTS).glob("step_*"))
        files = [path for path in newest.glob("**/*") if path.is_file()]
        hurt = run.random_.choice(sorted(files))
        raw = bytearray(hurt.read_bytes())
        raw[run.random_.randrange(len(raw))] ^= 1
        hurt.write_bytes(raw)
    except (OSError, ValueError, IndexError):  # it is gone, incomplete, or empty
        return "nothing"
    return hurt.name


def take_out(run: Attacked) -> str:
    """Remove a node from the cluster file until the next fault."""
    gone = run.random_.choice(run.cluster.nodes)
    names = {node.name for node in run.cluster.nodes if node is not gone}
    run.offer(part_of(run.cluster, names))
    return gone.name


FAULTS: Mapping[Callable[[Attacked], str], int] = {
    kill: 8,
    stop_shortly: 3,
    stop: 2,
    damage: 4,
    take_out: 3,
}


def _one_worker(run: Attacked) -> tuple[str, int]:
    there = workers(run.run_dir)
    worker = run.random_.choice(sorted(there)) if there else "nobody"
    return worker, there.get(worker, -1)


def _signal(pid: int, number: signal.Signals) -> None:
    if pid > 0:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass  # it has ended meanwhile


def looked_at(pid: int) -> Line | None:
    """Return a process's memory and open descriptors; None if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        resident = next(x for x in status.split("\n") if x.startswith("VmRSS"))
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except (OSError, StopIteration):
        return None
    return {"resident_bytes": int(resident.split()[1]) * 1024, "open": descriptors}


def attack(run: Attacked, given: argparse.Namespace) -> list[Line]:
    """Train until the time is over, with a fault after each pause; return the lines."""
    lines, begin_s = list[Line](), time.monotonic()
    faults, weights = [*FAULTS], [*FAULTS.values()]
    while (now_s := time.monotonic() - begin_s) < given.minutes * 60:
        run.go_on()
        assert run.process is not None
        steps = read_journal(run.run_dir / METRICS)
        line: Line = {
            "at_s": round(now_s, 1),
            "step": steps[-1]["step"] if steps else 0,
            "load": os.getloadavg()[0],
            "controller": looked_at(run.process.pid),
            "workers": {w: looked_at(p) for w, p in workers(run.run_dir).items()},
        }
        if steps:
            run.let_go()
            (fault,) = run.random_.choices(faults, weights)
            line |= {"fault": fault.__name__, "on": fault(run)}
        lines.append(line)
        with given.output.open("a") as file:
            file.write(json.dumps(line) + "\n")
        time.sleep(given.pause_s)
    return lines


def summary(run: Attacked, lines: Sequence[Line], all_s: float) -> Line:
    """Return a summary of the whole time."""
    times_s = {
        line["step"]: line["step_time_s"]
        for line in read_journal(run.run_dir / METRICS)
        if "step_time_s" in line
    }
    found = events(run.run_dir, "recovered")
    recovery_s = sorted(sum(event["seconds"].values()) for event in found)
    return {
        "all_s": round(all_s),
        "faults": Counter(line["fault"] for line in lines if "fault" in line),
        "steps": len(times_s),
        "steps_without_a_gap": sorted(times_s) == [*range(1, len(times_s) + 1)],
        "goodput": round(sum(times_s.values()) / all_s, 3),
        "recoveries": len(found),
        "lost_steps": sum(event["lost_steps"] for event in found),
        "recovery_s": {
            "median": round(median(recovery_s), 2) if recovery_s else None,
            "most": round(recovery_s[-1], 2) if recovery_s else None,
        },
        "replanned": len(events(run.run_dir, "replanned")),
        "ended_by_itself_with": run.codes,
        "controller": {
            what: _growth(
                [line["controller"] for line in lines if "fault" in line], what
            )
            for what in ("resident_bytes", "open")
        },
        "median_load": median(line["load"] for line in lines),
    }


def _growth(seen: Sequence[Line | None], what: str) -> dict[str, float]:
    """Return medians of the first and last quarter, the growth, and the maximum."""
    numbers = [line[what] for line in seen if line is not None]
    quarter = max(1, len(numbers) // 4)
    first, last = median(numbers[:quarter]), median(numbers[-quarter:])
    return {
        "first_quarter": first,
        "last_quarter": last,
        "grown": round(last / first - 1, 4),
        "most": max(numbers),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--pause-s", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/endurance"))
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    given.output = given.output or given.folder / "lines.jsonl"
    given.folder.mkdir(parents=True, exist_ok=True)
    cluster = load_cluster("tiny")
    run = Attacked(
        folder=given.folder, cluster=cluster, random_=random.Random(given.seed)
    )
    begin_s = time.monotonic()
    lines = attack(run, given)
    all_s = time.monotonic() - begin_s
    run.let_go()
    code = run.end()
    print(json.dumps(summary(run, lines, all_s) | {"stopped_with": code}, indent=1))


if __name__ == "__main__":
    main()
