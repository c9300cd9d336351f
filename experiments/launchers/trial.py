# SPDX-License-Identifier: Apache-2.0
"""Runs training on two nodes under a launcher, and compares it after kills.

Owns the run (two replicas of preset `tiny`, on CPUs in place of GPUs), waiting for a
step, finding processes by their words and environment, and the comparison with an
undisturbed run. Does not own the systems (`own_slurm.py`, `own_sshd.py`).
"""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.plans.plan_files import write_plan
from tests.launchers.fake_programs import processes

WORKER = "hetjax.training.worker"
STEPS, AT = 400, 10  # steps of a run, and the step at which it is disturbed
PATIENCE_S = 180.0
_TOLERANCE = 1e-5
_LICENCE = Path(__file__).parents[2] / "LICENSE"
_CLUSTER = """name = "pair"

[[node]]
name = "{left}"
device = "A100-SXM4-40GB"
count = 1

[[node]]
name = "{right}"
device = "T4"
count = 1
"""


def written(folder: Path, left: str, right: str) -> tuple[Path, Path]:
    """Write a cluster of two nodes, and a plan with a whole model on each."""
    cluster, plan = folder / f"{left}-{right}.toml", folder / f"{left}-{right}.json"
    cluster.write_text(_CLUSTER.format(left=left, right=right))
    replicas = tuple(
        Replica(
            num_microbatches=2,
            microbatch_size=2,
            stages=(Stage(node=node, devices=(0,), layers=(0, 6), launch_ahead=1),),
        )
        for node in (left, right)
    )
    write_plan(plan, Plan(model="tiny", seq_len=16, global_batch=8, replicas=replicas))
    return cluster, plan


def settings(folder: Path, run_dir: Path, plan: Path) -> list[str]:
    """Return the words after `train` of the run, which trains on the licence."""
    text = folder / "licence.txt"
    text.write_bytes(_LICENCE.read_bytes())
    words = ["tiny", "--run-dir", str(run_dir), "--plan", str(plan), "--simulate"]
    words += ["--steps", str(STEPS), "--global-batch", "8", "--seq-len", "16"]
    words += ["--data.path", str(text), "--data.cache-dir", str(folder / "cache")]
    return [*words, "--evaluation.sample-tokens", "0", "--checkpoint.every", "100"]


def losses(run_dir: Path) -> dict[int, float]:
    """Return the recorded losses by step; the last line of a step counts."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    told = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return {line["step"]: line["loss"] for line in told if "loss" in line}


def events(run_dir: Path) -> list[str]:
    """Return the events of the run, in order."""
    path = run_dir / "events.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line)["event"] for line in text.splitlines()]


def wait_for(what: str, is_so: Callable[[], object]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what}: not in {PATIENCE_S:g} s")
        time.sleep(0.1)


def wait_for_step(run_dir: Path, step: int = AT) -> None:
    wait_for(f"step {step}", lambda: max(losses(run_dir), default=0) >= step)


def kill(pids: Sequence[int]) -> int:
    """Kill them all; return their number."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return len(pids)


def same(run_dir: Path, whole: dict[int, float]) -> bool:
    """Whether a run has all steps, and the losses of the undisturbed one."""
    own = losses(run_dir)
    return own.keys() == whole.keys() and all(
        abs(own[step] - loss) <= _TOLERANCE * abs(loss) for step, loss in whole.items()
    )


def report(what: str, run_dir: Path, whole: dict[int, float], **more: object) -> None:
    """Print a line of JSON on a run that has ended."""
    print(
        json.dumps(
            {
                "what": what,
                "losses_equal": same(run_dir, whole),
                "steps": len(losses(run_dir)),
                "events": events(run_dir),
                "left_over": len(processes(["-m", WORKER], str(run_dir.parent))),
                **more,
            }
        ),
        flush=True,
    )
