# SPDX-License-Identifier: Apache-2.0
"""Replays a trace of spot machines: one elastic run against stop and restart.

    python -m experiments.recovery.spot [--trace FILE] [--until 7000] [--seconds 280]

Replays the number of available machines in the first `--until` seconds of a trace
within `--seconds`. A machine is a node with one worker process on this machine. A
machine that vanishes is killed (SIGKILL) and its disk is lost; one that comes is new.
The controller's machine never goes away. Two ways see the same events, each on its own
clock, which starts at the end of the first step:

* elastic: the run reads its new cluster file and continues;
* restart: each change kills all processes and removes local checkpoints, and the same
  command restarts from the store with the new cluster file.

Both save every `--every` steps to a store. If there are no machines, both wait for
some, then start from the store. Finally, the losses of the elastic run are compared
with those of undisturbed runs in one process. With `--folder`, parts that are already
in the folder are not repeated; `--only` runs one part. Prints one JSON object.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from experiments.recovery.kills import recoveries, workers
from hetjax.files.writing import write_whole
from hetjax.training.directory.journal import read_journal
from hetjax.training.observers.goodput import steps_s

# (seconds, A100s) from sailor/Controller/trace_based/a100_trace.json of
# github.com/eth-easl/sailor, MIT licence, Copyright (c) 2023 - present ETH Zurich
_TRACE = [(0, 4), (126, 3), (693, 2), (1701, 3), (1764, 4), (2079, 3), (2394, 4)]
_TRACE += [(3276, 3), (3402, 4), (4473, 3), (4662, 4), (6489, 3)]
_WAYS, _LOSSES = ("elastic", "restart"), "losses"
_STEPS = 10_000  # never reached; the learning rates depend on it
_LOOK_S, _FIRST_STEP_S, _END_S = 0.05, 300.0, 120.0


@dataclass(frozen=True)
class Change:
    """The nodes that are there from `at_s` on."""

    at_s: float
    nodes: tuple[str, ...]


def changes(
    trace: Sequence[tuple[float, int]], until_s: float, speed: float, seed: int
) -> list[Change]:
    """Return the nodes over time: any may vanish, and none comes back as it was."""
    random_, found, named = random.Random(seed), [], 0
    nodes: list[str] = []
    for at_s, number in trace:
        if at_s >= until_s or (found and number == len(nodes)):
            continue
        while len(nodes) > number:
            nodes.remove(random_.choice(nodes))
        while len(nodes) < number:
            nodes.append(f"spot-{named}")
            named += 1
        found.append(Change(at_s=at_s / speed, nodes=tuple(nodes)))
    return found


def cluster_toml(nodes: Sequence[str], device: Sequence[str]) -> str:
    """Return the cluster file of these nodes; all have the lines of `device`."""
    tables = [["[[node]]", f'name = "{name}"', *device] for name in nodes]
    return "\n".join(['name = "spot"', *(line for t in tables for line in t), ""])


@dataclass
class Run:
    """The run of one way, whose processes come and go."""

    folder: Path
    words: list[str]
    device: list[str]
    process: subprocess.Popen[bytes] | None = None
    nodes: tuple[str, ...] = ()
    starts: int = 0
    broken: list[int] = field(default_factory=list)  # unrequested exit codes

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def start(self) -> None:
        command = [sys.executable, "-m", "hetjax.train", *self.words]
        command += ["--launcher", "processes", "--run-dir", str(self.run_dir)]
        command += ["--cluster", str(self.folder / "cluster.toml")]
        command += ["--checkpoint.cloud", (self.folder / "store").as_uri()]
        with (self.folder / "said.txt").open("a") as said:
            self.process = subprocess.Popen(
                command, stdout=said, stderr=subprocess.STDOUT
            )
        self.starts += 1

    def place(self, nodes: tuple[str, ...]) -> None:
        """Make these the available nodes."""
        self.nodes = nodes
        if nodes:
            text = cluster_toml(nodes, self.device)
            write_whole(self.folder / "cluster.toml", text)

    def kill(self, names: Sequence[str]) -> None:
        """Take away these machines with their disks."""
        self._kill_workers(names)
        for disk in (self.run_dir / "checkpoints").glob("*/*"):
            if disk.name in names:
                shutil.rmtree(disk)

    def kill_all(self) -> None:
        """Kill the controller and its workers; disks stay."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        self._kill_workers(workers(self.run_dir))

    def _kill_workers(self, names: Collection[str]) -> None:
        for name, pid in workers(self.run_dir).items():
            if name in names:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def mend(self) -> None:
        """Restart the run if it has ended by itself."""
        if self.process is not None and self.process.poll() is not None:
            self.broken.append(self.process.returncode)
            self.kill_all()
            self.start()

    def end(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self.broken.append(-1)
        self.kill_all()

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl that describe steps."""
        lines = read_journal(self.run_dir / "metrics.jsonl")
        return [line for line in lines if "loss" in line]


def changed(run: Run, way: str, nodes: tuple[str, ...]) -> None:
    """Apply a change to the run in this way."""
    gone, before = set(run.nodes) - set(nodes), run.nodes
    run.place(nodes)
    if way == "restart" or not nodes:
        run.kill_all()
        shutil.rmtree(run.run_dir / "checkpoints", ignore_errors=True)
    else:
        run.kill(sorted(gone))
    if nodes and (way == "restart" or not before):
        run.start()


def watched(run: Run, until_s: float) -> Iterator[tuple[float, int]]:
    """Yield the clock and the number of steps until then, at each new number."""
    before = None
    while time.monotonic() < until_s:
        run.mend()
        done = len(run.lines())
        if done != before:
            yield time.monotonic(), done
        before = done
        time.sleep(_LOOK_S)


def replayed(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Train while nodes come and go, in the way that the folder is named after."""
    way, events = folder.name, planned(given)
    folder.mkdir(parents=True)
    run = Run(folder=folder, words=words(given), device=device(given))
    run.place(events[0].nodes)
    run.start()
    try:
        waited = watched(run, time.monotonic() + _FIRST_STEP_S)
        first = next((at for at in waited if at[1]), None)
        if first is None:
            raise SystemExit(f"{way}: no step in {_FIRST_STEP_S} s, see {run.folder}")
        begin_s, seen = first[0], [(0.0, first[1])]
        for now, after in pairwise([*events, Change(at_s=given.seconds, nodes=())]):
            if now.at_s:
                changed(run, way, now.nodes)
            for at_s, done in watched(run, begin_s + after.at_s):
                seen.append((at_s - begin_s, done))
            print(f"{way}: {after.at_s:.0f} s, {seen[-1][1]}", file=sys.stderr)
        lines = run.lines()
    finally:
        run.end()
    counted = [line for line in lines if line["step"] > first[1]]
    return {
        "steps": len(counted),
        "tokens": sum(line["tokens"] for line in counted),
        "goodput": round(steps_s(counted) / given.seconds, 3),
        "starts": run.starts,
        "ended_by_themselves": run.broken,
        "pause_s": pauses(seen, events, given.seconds),
        **({"recoveries": recovered(run.run_dir)} if way == "elastic" else {}),
    }


def pauses(
    seen: Sequence[tuple[float, int]], events: Sequence[Change], end_s: float
) -> dict[str, Any]:
    """Return the longest time without a new step between each change and the next."""
    news = [late[0] for early, late in pairwise(seen) if late[1] > early[1]]
    found = []
    for now, after in pairwise([*(e.at_s for e in events), end_s]):
        inside = [s for s in news if now < s < after]
        found.append(max(b - a for a, b in pairwise([now, *inside, after])))
    after_changes = found[1:]
    return {"median": round(median(after_changes), 2), "all": rounded(after_changes)}


def recovered(run_dir: Path) -> dict[str, Any]:
    """Summarize the recoveries that the run itself reports."""
    events = recoveries(run_dir)
    seconds = [sum(e["seconds"].values()) for e in events]
    phases = {phase for e in events for phase in e["seconds"]}
    return {
        "number": len(events),
        "reported": goodputs(run_dir),
        "lost_steps": sum(e["lost_steps"] for e in events),
        "seconds_median": round(median(seconds), 2) if seconds else None,
        "seconds": rounded(seconds),
        "seconds_of_phases": {
            phase: round(median(e["seconds"].get(phase, 0.0) for e in events), 2)
            for phase in sorted(phases)
        },
    }


def goodputs(run_dir: Path) -> list[dict[str, Any]]:
    """Return each completed start's own account of its time, from its first moment."""
    events = read_journal(run_dir / "events.jsonl")
    found = [event for event in events if event["event"] == "goodput"]
    return [{k: v for k, v in e.items() if k not in ("event", "time")} for e in found]


def rounded(numbers: Sequence[float]) -> list[float]:
    return [round(number, 2) for number in numbers]


def compared(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Compare the elastic run's losses with those of undisturbed runs.

    One of these has two of the nodes, the other the preset's plan. Once rounding errors
    have grown, these also differ from each other, as much as from the elastic run.
    """
    folder.mkdir(exist_ok=True)
    found = losses(folder.parent / "elastic" / "run")
    nodes = folder / "two.toml"
    write_whole(nodes, cluster_toml(["spot-0", "spot-1"], device(given)))
    two = undisturbed(folder / "two_nodes", ["--cluster", str(nodes)], found, given)
    preset = undisturbed(folder / "preset", [], found, given)
    return {
        "steps": len(found),
        "all_steps_once": sorted(found) == list(range(1, len(found) + 1)),
        "elastic_from_two_nodes": apart(found, two),
        "elastic_from_preset": apart(found, preset),
        "two_nodes_from_preset": apart(two, preset),
    }


def undisturbed(
    run_dir: Path, options: list[str], found: Mapping[int, float], given: Any
) -> dict[int, float]:
    """Return losses of a run in one process with as many steps; part may exist."""
    there = losses(run_dir)
    if len(there) < len(found):
        command = [sys.executable, "-m", "hetjax.train", *words(given), *options]
        command += ["--run-dir", str(run_dir)]
        command += ["--stop-after", str(len(found) - len(there))]
        code = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
        assert code == 4, code
    return losses(run_dir)


def losses(run_dir: Path) -> dict[int, float]:
    lines = read_journal(run_dir / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def apart(one: Mapping[int, float], other: Mapping[int, float]) -> dict[str, Any]:
    off = {step: abs(one[step] / other[step] - 1) for step in one}
    return {
        "largest_relative_difference": float(f"{max(off.values()):.2g}"),
        "first_step_beyond_1e-5": min((s for s in off if off[s] > 1e-5), default=None),
    }


def device(given: argparse.Namespace) -> list[str]:
    lines = [f'device = "{given.device}"', "count = 1", "spot = true"]
    small = given.memory_gib
    return lines if small is None else [*lines, f"memory_gib = {small}"]


def words(given: argparse.Namespace) -> list[str]:
    found = [given.preset, "--steps", str(_STEPS), *given.options]
    found += ["--checkpoint.every", str(given.every), "--evaluation.every", "0"]
    return [*found, "--evaluation.num-batches", "1", "--evaluation.sample-tokens", "0"]


def planned(given: argparse.Namespace) -> list[Change]:
    trace = _TRACE
    if given.trace is not None:
        lines = json.loads(given.trace.read_text())
        trace = [(line["Time"], line["GPUs"]) for line in lines]
    return changes(trace, given.until, given.until / given.seconds, given.seed)


def done(folder: Path, part: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return the result of this part; compute it unless it is in the folder."""
    result = folder / f"{part}.json"
    if not result.exists():
        if part in _WAYS:
            shutil.rmtree(folder / part, ignore_errors=True)
        do = compared if part == _LOSSES else replayed
        found = do(folder / part, given) | {"load": round(os.getloadavg()[0], 1)}
        result.write_text(json.dumps(found))
    return json.loads(result.read_text())


def measured(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    parts = [given.only] if given.only else [*_WAYS, _LOSSES]
    found = {part: done(folder, part, given) for part in parts}
    if given.only:
        return found
    events = planned(given)
    elastic, restart = (found[way]["steps"] for way in _WAYS)
    return {
        "trace_s": given.until,
        "wall_s": given.seconds,
        "speed": round(given.until / given.seconds, 1),
        "changes": len(events) - 1,
        "nodes": [{"at_s": round(e.at_s, 1), "nodes": len(e.nodes)} for e in events],
        "every": given.every,
        "steps_over_restart": round(elastic / restart, 2) if restart else None,
        **found,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, help='[{"Time": s, "GPUs": n}, ...]')
    parser.add_argument("--until", type=float, default=7000.0, help="in trace seconds")
    parser.add_argument("--seconds", type=float, default=280.0, help="of the replay")
    parser.add_argument("--every", type=int, default=10, help="steps between saves")
    parser.add_argument("--seed", type=int, default=0, help="selects who vanishes")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--device", default="A100-SXM4-80GB")
    parser.add_argument("--memory-gib", type=float, help="of a device, if not its own")
    parser.add_argument("--only", choices=[*_WAYS, _LOSSES])
    parser.add_argument("--folder", type=Path, help="to keep what is done")
    parser.add_argument("options", nargs="*", help="of hetjax.train, after --")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # kills what it has started
    with tempfile.TemporaryDirectory() as folder:
        found = measured(given, (given.folder or Path(folder)).absolute())
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
