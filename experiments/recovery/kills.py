# SPDX-License-Identifier: Apache-2.0
"""Kills workers at random instants, and compares each run with an uninterrupted one.

    python -m experiments.recovery.kills [--kills 100] [--seed 0] [--steps 12]
        [--launcher processes|ray] [--plan FILE] [--folder runs/kills]
        [--results FOLDER/results.jsonl]

Trains preset `tiny` on worker processes of this machine, or on actors of a Ray cluster
that each run starts here. Kills a worker (SIGKILL) at random moments, a few per run,
whatever the run is doing: training, evaluating, saving or recovering. At the end each
loss must have the bits of a run without kills. If a node was killed so often that the
run continued without it, the reference changes to the same plan after the same step.
Either plan may have made an evaluation after that step, so it may differ by rounding.
The learning rate is constant so that steps can be trained in two parts. `lost_steps`
were repeated from a checkpoint; `lost_beside_a_replica` are recoveries that lost steps
although all workers of a replica were there.

Each run adds a line to the results, which may hold several seeds and launchers.
`--kills` is the total for the seed: a second start continues where the first has
stopped, with new run numbers. Each run's folder has its output (`stdout`, `stderr`),
its run directory and the logs of its workers; only the checkpoints of a run that ended
as expected are removed. Prints one JSON object, a summary for each seed and launcher.
Use a separate folder for each plan of your own, too.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from math import isclose
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from experiments.launchers.own_ray import is_actor
from hetjax.files.writing import write_whole
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.rundir import CHECKPOINTS, EVENTS, LOGS, METRICS

_PER_RUN, _PAUSE_S, _LOOK_S = 3, (0.2, 6.0), 0.1
_LONGEST_RUN_S, _LAST_WORDS_S = 1200, 30
_ROUNDING = 1e-6  # relative
_MARK = "HETJAX_KILLED_RUN"
_MOST_IDLE = 5  # successive runs in which no worker could be killed
Lines = list[dict[str, Any]]


def command(run_dir: Path, steps: int, launcher: str, plan: Path | None) -> list[str]:
    words = [sys.executable, "-m", "hetjax.train", "tiny", "--launcher", launcher]
    words += ["--run-dir", str(run_dir), "--steps", str(steps)]
    words += ["--optimizer.schedule", "constant", "--optimizer.warmup-steps", "0"]
    words += ["--checkpoint.every", "3", "--evaluation.every", "5"]
    words += ["--evaluation.num-batches", "1", "--evaluation.sample-tokens", "0"]
    return [*words, *(() if plan is None else ("--plan", str(plan)))]


def started(words: Sequence[str], said: Path) -> subprocess.Popen[bytes]:
    """Start a command; its output is appended to `said`/stdout and `said`/stderr.

    At a fatal signal, it and its workers write the stacks of all threads there. All its
    processes have the path `said` in their environment, which identifies them.
    """
    said.mkdir(parents=True, exist_ok=True)
    with (said / "stdout").open("ab") as out, (said / "stderr").open("ab") as err:
        own = {"PYTHONFAULTHANDLER": "1", _MARK: str(said)}
        return subprocess.Popen(words, stdout=out, stderr=err, env=os.environ | own)


def trained(run_dir: Path, steps: int, launcher: str, plan: Path | None) -> int:
    """Train without kills, from where the run has come; return the exit code."""
    return started(command(run_dir, steps, launcher, plan), run_dir.parent).wait()


def losses(run_dir: Path) -> Lines:
    """Return the numbers of each line of metrics.jsonl that no clock determines."""
    kept = ("step", "loss", "val_loss", "grad_norm")
    lines = read_journal(run_dir / METRICS)
    return [{name: line[name] for name in kept if name in line} for line in lines]


def unlike(
    run_dir: Path, whole: Lines, steps: int, launcher: str, plan: Path | None
) -> list[str]:
    """Return what is wrong with the losses, which must have the bits of `whole`.

    After a change of plan, the reference is a run that changed without kills.
    """
    found = losses(run_dir)
    if not was_replanned(run_dir):
        return [] if found == whole else ["losses differ"]
    at = events(run_dir, "replanned")[-1]["step"]
    other = run_dir.parent / "changed" / "run"
    codes = [trained(other, at, launcher, plan)] if at else []
    codes += [trained(other, steps, launcher, run_dir / "plan.json")]
    if any(codes):
        return [f"the run without kills ended with {codes}"]
    before = [line for line in whole if line["step"] <= at]
    expected = before + [line for line in losses(other) if line["step"] > at]
    same = alike(found, expected, at)
    return [] if same else ["losses differ after the change of plan"]


def alike(found: Lines, expected: Lines, at: int) -> bool:
    """Whether the numbers have the same bits.

    An evaluation after step `at` may differ by rounding: either plan may have made it.
    """
    return len(found) == len(expected) and all(
        one.keys() == other.keys()
        and all(
            isclose(number, other[name], rel_tol=_ROUNDING)
            if name == "val_loss" and one["step"] == at
            else number == other[name]
            for name, number in one.items()
        )
        for one, other in zip(found, expected, strict=True)
    )


def workers(run_dir: Path) -> dict[str, int]:
    """Return the pids of the run's workers by name: the writers of their logs."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            log = entry.resolve()
        except OSError:
            continue
        if log.parent == (run_dir / LOGS).resolve():
            found[log.stem] = int(entry.parts[2])
    return found


def actors(run_dir: Path) -> dict[str, int]:
    """Return the pids of the run's workers in Ray, by name."""
    mark, found = f"{_MARK}={run_dir.parent}\0".encode(), dict[str, int]()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pid = int(entry.name)
            if is_actor(pid) and mark in (entry / "environ").read_bytes():
                found[entry.name] = pid
    return found


WORKERS = {"processes": workers, "ray": actors}


def killed_run(
    folder: Path,
    steps: int,
    launcher: str,
    plan: Path | None,
    random_: random.Random,
    most: int,
) -> dict[str, Any]:
    """Train to the end, killing workers meanwhile; return the exit code and kills."""
    run_dir, end_s = folder / "run", time.monotonic() + _LONGEST_RUN_S
    run = started(command(run_dir, steps, launcher, plan), folder)
    kills: dict[int, str] = {}  # by pid: a worker that is still dying is not there

    def goes_on() -> bool:
        return run.poll() is None and time.monotonic() < end_s

    try:
        while goes_on() and b"\nstep " not in (folder / "stdout").read_bytes():
            time.sleep(_LOOK_S)
        while goes_on() and len(kills) < most:
            time.sleep(random_.uniform(*_PAUSE_S))
            if run.poll() is None:
                there = WORKERS[launcher](run_dir)
                kills |= killed(there, random_, kills.keys())
        return {"code": _ended(run, end_s), "kills": [*kills.values()]}
    finally:
        run.kill()  # it is still running only if this was interrupted


def killed(
    found: Mapping[str, int], random_: random.Random, before: Collection[int]
) -> dict[int, str]:
    """Kill one of these workers; return its name by pid, or nothing if none is left."""
    there = {worker: pid for worker, pid in found.items() if pid not in before}
    with suppress(ProcessLookupError):
        for worker in random_.sample(sorted(there), min(1, len(there))):
            os.kill(there[worker], signal.SIGKILL)
            return {there[worker]: worker}
    return {}


def _ended(run: subprocess.Popen[bytes], end_s: float) -> int:
    """Wait for the run; let one that does not end write its stacks."""
    try:
        return run.wait(max(0.0, end_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        run.send_signal(signal.SIGABRT)
    try:
        return run.wait(_LAST_WORDS_S)
    except subprocess.TimeoutExpired:
        run.kill()
        return run.wait()


def events(run_dir: Path, name: str) -> Lines:
    return [line for line in read_journal(run_dir / EVENTS) if line["event"] == name]


def recoveries(run_dir: Path) -> Lines:
    return events(run_dir, "recovered")


def was_replanned(run_dir: Path) -> bool:
    return bool(events(run_dir, "replanned"))


def beside_a_replica(run_dir: Path) -> Lines:
    """Return recoveries that lost steps although some replica lost no worker."""
    plan = json.loads((run_dir / "plan.json").read_text())
    nodes = [{stage["node"] for stage in r["stages"]} for r in plan["replicas"]]
    return [
        event
        for event in recoveries(run_dir)
        if event["lost_steps"] and any(not n & {*event["started"]} for n in nodes)
    ]


def outcome(
    folder: Path,
    launcher: str,
    plan: Path | None,
    ended: dict[str, Any],
    whole: Lines,
) -> dict[str, Any]:
    """Return the outcome of a run, with what was not expected."""
    run_dir, code, steps = folder / "run", ended["code"], whole[-1]["step"]
    wrong = [] if code == 0 else [f"exit code {code}: {_words(code)}"]
    finished = bool(events(run_dir, "finished"))
    if finished:
        wrong += unlike(run_dir, whole, steps, launcher, plan)
    else:
        wrong.append("not finished")
    found = recoveries(run_dir)
    if not wrong:
        for checkpoints in folder.glob(f"**/{CHECKPOINTS}"):
            shutil.rmtree(checkpoints)
    return {
        **ended,
        "wrong": wrong,
        "finished": finished,
        "replanned": was_replanned(run_dir),
        "lost_steps": [event["lost_steps"] for event in found],
        "recovery_s": [round(sum(event["seconds"].values()), 3) for event in found],
        "lost_beside_a_replica": beside_a_replica(run_dir) if found else [],
        "load": os.getloadavg()[0],
    }


def _words(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else "see its stderr"


def read_results(path: Path) -> Lines:
    """Return the lines of all runs so far, without an incomplete last line."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def append_result(path: Path, line: dict[str, Any]) -> None:
    lines = [*read_results(path), line]
    write_whole(path, "".join(json.dumps(one) + "\n" for one in lines))


def next_number(folder: Path) -> int:
    """Return a number that no run has had, not even an abandoned one."""
    numbers = [int(run.name.removeprefix("run")) for run in folder.glob("run*")]
    return max(numbers, default=-1) + 1


def measure(given: argparse.Namespace) -> None:
    """Add runs to the results until the number of kills is reached."""
    launcher, plan = given.launcher, given.plan
    reference = given.folder / f"whole-{launcher}-{given.steps}" / "run"
    if code := trained(reference, given.steps, launcher, plan):
        sys.exit(f"a run without kills ended with code {code}: see {reference.parent}")
    whole = losses(reference)
    key = {"seed": given.seed, "steps": given.steps, "launcher": launcher}
    num_kills, num_idle = _num_kills(given.results, key), 0
    while num_kills < given.kills:
        runs = given.folder / f"{launcher}-seed{given.seed}-{given.steps}"
        number = next_number(runs)
        folder = runs / f"run{number}"
        random_ = random.Random(f"{given.seed} {number}")
        most = min(_PER_RUN, given.kills - num_kills)
        line = key | {"run": number, "folder": str(folder), "commit": commit()}
        ended = killed_run(folder, given.steps, launcher, plan, random_, most)
        line |= outcome(folder, launcher, plan, ended, whole)
        append_result(given.results, line)
        num_kills = _num_kills(given.results, key)
        said = f"run {number}: code {line['code']}, kills {' '.join(line['kills'])}"
        said += f"; {'; '.join(line['wrong']) or 'as expected'}"
        print(f"{said}; {num_kills} of {given.kills}", file=sys.stderr, flush=True)
        num_idle = 0 if line["kills"] else num_idle + 1
        if num_idle == _MOST_IDLE:
            sys.exit(f"nobody could be killed in {num_idle} runs: see {folder}")


def commit() -> str:
    """Return the commit of this code."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def _num_kills(results: Path, key: dict[str, Any]) -> int:
    """Return the number of kills of the seed so far."""
    own = [line for line in read_results(results) if key.items() <= line.items()]
    return sum(len(line["kills"]) for line in own)


def summary(lines: Lines) -> dict[str, Any]:
    """Return a summary of one seed's runs."""
    lost = [steps for line in lines for steps in line["lost_steps"]]
    seconds = sorted(s for line in lines for s in line["recovery_s"])
    loads = sorted(line["load"] for line in lines)
    return {
        "seed": lines[0]["seed"],
        "steps": lines[0]["steps"],
        "launcher": lines[0]["launcher"],
        "commits": sorted({line["commit"] for line in lines}),
        "runs": len(lines),
        "kills": sum(len(line["kills"]) for line in lines),
        "wrong": [line for line in lines if line["wrong"]],
        "ended_without_a_node": sum(line["replanned"] for line in lines),
        "recoveries": len(seconds),
        "with_lost_steps": sum(steps > 0 for steps in lost),
        "lost_steps": sum(lost),
        "lost_beside_a_replica": [e for x in lines for e in x["lost_beside_a_replica"]],
        "recovery_s": {
            "median": seconds[len(seconds) // 2] if seconds else None,
            "most": seconds[-1] if seconds else None,
        },
        "median_load": loads[len(loads) // 2],
    }


def summaries(lines: Lines) -> Lines:
    """Return a summary for each seed, number of steps and launcher, in their order."""
    parts = dict[tuple[object, ...], Lines]()
    for line in lines:
        key = line["seed"], line["steps"], line["launcher"]
        parts.setdefault(key, []).append(line)
    return [summary(part) for part in parts.values()]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--launcher", choices=sorted(WORKERS), default="processes")
    parser.add_argument("--plan", type=Path, help="of tiny; its own unless given")
    parser.add_argument("--folder", type=Path, default=Path("runs/kills"))
    parser.add_argument("--results", type=Path)
    given = parser.parse_args(arguments)
    given.results = given.results or given.folder / "results.jsonl"
    given.folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with FileLock(given.folder / ".lock", timeout=0):
            measure(given)
    except Timeout:
        sys.exit(f"another start works in {given.folder}: give another --folder")
    print(json.dumps({"seeds": summaries(read_results(given.results))}, indent=1))


if __name__ == "__main__":
    main()
