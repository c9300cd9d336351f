# SPDX-License-Identifier: Apache-2.0
"""Workers killed at random instants: does every run end as an uninterrupted one?

    python -m experiments.recovery.kills [--kills 100] [--seed 0] [--steps 12]

Trains preset `tiny` on worker processes of this machine, kills one (SIGKILL) at random
moments, a few per run, whatever the run does then: training, evaluating, saving or
recovering. At the end each loss must have the bits of a run without kills. Where a node
was killed so often that the run went on without it, that is a run that changed to the
same plan after the same step; the learning rate is constant for its sake, so that steps
can be trained in two parts. `lost_steps` are those that were done again from a
checkpoint, and `lost_beside_a_replica` recoveries that lost some although all workers
of a replica were there. Prints one JSON object.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetjax.training.journal import read_journal
from hetjax.training.rundir import EVENTS, LOGS, METRICS

_PER_RUN, _PAUSE_S = 3, (0.2, 6.0)
_LONGEST_RUN_S = 600
Losses = list[dict[str, Any]]


def command(run_dir: Path, steps: int) -> list[str]:
    words = [sys.executable, "-m", "hetjax.train", "tiny", "--launcher", "processes"]
    words += ["--run-dir", str(run_dir), "--steps", str(steps)]
    words += ["--optimizer.schedule", "constant", "--optimizer.warmup-steps", "0"]
    words += ["--checkpoint.every", "3", "--evaluation.every", "5"]
    return [*words, "--evaluation.num-batches", "1", "--evaluation.sample-tokens", "0"]


def trained(run_dir: Path, steps: int, *more: str) -> Losses:
    """Train without kills, from where the directory's run has come."""
    words = [*command(run_dir, steps), *more]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return losses(run_dir)


def losses(run_dir: Path) -> Losses:
    """The numbers of every line of metrics.jsonl that no clock decides."""
    kept = ("step", "loss", "val_loss", "grad_norm")
    lines = read_journal(run_dir / METRICS)
    return [{name: line[name] for name in kept if name in line} for line in lines]


def as_expected(run_dir: Path, whole: Losses, steps: int) -> bool:
    """Whether the losses have the bits of `whole`; since a change of plan, those of
    a run that changed without kills."""
    found = losses(run_dir)
    if not any(event["event"] == "replanned" for event in events(run_dir)):
        return found == whole
    at, other = recoveries(run_dir)[-1]["step"], run_dir.with_name(run_dir.name + "b")
    if at:
        trained(other, at)
    changed = trained(other, steps, "--plan", str(run_dir / "plan.json"))
    before = [line for line in whole if line["step"] <= at]
    return found == before + [line for line in changed if line["step"] > at]


def workers(run_dir: Path) -> dict[str, int]:
    """Pids of the run's workers by name: who writes to their logs."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            log = entry.resolve()
        except OSError:
            continue
        if log.parent == (run_dir / LOGS).resolve():
            found[log.stem] = int(entry.parts[2])
    return found


def killed_run(
    run_dir: Path, steps: int, random_: random.Random, most: int
) -> dict[str, Any]:
    """Train to the end, killing workers on the way; what came of it."""
    run = subprocess.Popen(
        command(run_dir, steps),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.stdout is not None
    kills: list[str] = []
    said = []
    while line := run.stdout.readline():
        said.append(line)
        if line.startswith("step "):
            break
    end_s = time.monotonic() + _LONGEST_RUN_S
    while run.poll() is None and len(kills) < most and time.monotonic() < end_s:
        time.sleep(random_.uniform(*_PAUSE_S))
        there = workers(run_dir)
        if run.poll() is None and there:
            worker = random_.choice(sorted(there))
            try:
                os.kill(there[worker], signal.SIGKILL)
            except ProcessLookupError:
                continue
            kills.append(worker)
    try:
        rest, _ = run.communicate(timeout=_LONGEST_RUN_S)
    except subprocess.TimeoutExpired:
        run.kill()
        rest = run.communicate()[0] + "\nno end"
    return {"code": run.returncode, "kills": kills, "said": "".join(said) + rest}


def events(run_dir: Path) -> Sequence[dict[str, Any]]:
    return read_journal(run_dir / EVENTS)


def recoveries(run_dir: Path) -> list[dict[str, Any]]:
    return [event for event in events(run_dir) if event["event"] == "recovered"]


def beside_a_replica(run_dir: Path) -> list[dict[str, Any]]:
    """Recoveries that lost steps although nobody of some replica was gone."""
    plan = json.loads((run_dir / "plan.json").read_text())
    nodes = [{stage["node"] for stage in r["stages"]} for r in plan["replicas"]]
    return [
        event
        for event in recoveries(run_dir)
        if event["lost_steps"] and any(not n & {*event["gone"]} for n in nodes)
    ]


def measured(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    whole = trained(folder / "whole", given.steps)
    random_ = random.Random(given.seed)
    number, kills, replanned, wrong, found, needless = 0, 0, 0, [], [], []
    while kills < given.kills:
        run_dir = folder / f"run{number}"
        most = min(_PER_RUN, given.kills - kills)
        ended = killed_run(run_dir, given.steps, random_, most)
        kills += len(ended["kills"])
        if ended["code"] != 0 or not as_expected(run_dir, whole, given.steps):
            wrong.append({"run": number} | ended)
        else:
            found += recoveries(run_dir)
            replanned += any(e["event"] == "replanned" for e in events(run_dir))
            needless += beside_a_replica(run_dir)
        number += 1
        print(number, kills, len(wrong), file=sys.stderr, flush=True)
    seconds = sorted(sum(e["seconds"].values()) for e in found)
    return {
        "runs": number,
        "kills": kills,
        "wrong": wrong,
        "ended_without_a_node": replanned,
        "recoveries": len(found),
        "with_lost_steps": sum(e["lost_steps"] > 0 for e in found),
        "lost_steps": sum(e["lost_steps"] for e in found),
        "lost_beside_a_replica": needless,
        "recovery_s": {
            "median": seconds[len(seconds) // 2] if seconds else None,
            "most": seconds[-1] if seconds else None,
        },
        "load": os.getloadavg()[0],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measured(given, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
