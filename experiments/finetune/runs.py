# SPDX-License-Identifier: Apache-2.0
"""Runs `hetjax train`, kills it once and resumes it with another plan.

Owns the cluster of three simulated kinds, the two plans and the kill. Does not own the
reference for the runs (`reference.py`).
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.plans.plan_files import write_plan
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.rundir import METRICS

SEQ_LEN, GLOBAL_BATCH, STEPS = 64, 8, 40
LEARNING_RATE, WEIGHT_DECAY, BETAS, CLIP_NORM = 1e-3, 0.1, (0.9, 0.95), 1.0
KILLED_AT, CHECKPOINT_EVERY = 15, 10
_LIMIT_S, _LOOK_S = 600, 0.05
_MICROBATCH = 2

CLUSTER = Cluster(
    name="three-kinds",
    nodes=(
        Node(name="a100", device="A100-SXM4-80GB", count=1),
        Node(name="v100", device="V100-SXM2-32GB", count=1),
        Node(name="t4", device="T4", count=1),
    ),
)


def first_plan(model: str) -> Plan:
    """Return replicas of unlike depth: a pipeline of two kinds, and one device."""
    pipeline = _stage("a100", (0, 4), 2), _stage("v100", (4, 6), 1)
    return _plan(model, (3, pipeline), (1, (_stage("t4", (0, 6), 1),)))


def second_plan(model: str) -> Plan:
    """Return one pipeline over all three kinds, with other cuts."""
    cut = {"t4": (0, 2), "v100": (2, 3), "a100": (3, 6)}
    stages = tuple(
        _stage(node, cut[node], k) for node, k in zip(cut, (3, 2, 1), strict=True)
    )
    return _plan(model, (4, stages))


def _plan(model: str, *replicas: tuple[int, tuple[Stage, ...]]) -> Plan:
    return Plan(
        model=model,
        seq_len=SEQ_LEN,
        global_batch=GLOBAL_BATCH,
        replicas=tuple(
            Replica(num_microbatches=count, microbatch_size=_MICROBATCH, stages=stages)
            for count, stages in replicas
        ),
    )


def _stage(node: str, layers: tuple[int, int], launch_ahead: int) -> Stage:
    return Stage(node=node, devices=(0,), layers=layers, launch_ahead=launch_ahead)


def fine_tune(base: Path, rows: Path, run_dir: Path, *more: str) -> dict[int, float]:
    """Train by the first plan, kill, resume by the second; return losses by step."""
    words = _command(base, rows, run_dir, *more)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    cluster, model = run_dir.with_suffix(".toml"), str(base)
    cluster.write_text(cluster_toml(CLUSTER))
    words += ["--cluster", str(cluster)]
    plan = run_dir.with_suffix(".plan.json")
    write_plan(plan, first_plan(model))
    _killed([*words, "--plan", str(plan)], run_dir)
    write_plan(plan, second_plan(model))
    subprocess.run(
        [*words, "--plan", str(plan)], check=True, timeout=_LIMIT_S, stdout=sys.stderr
    )
    return losses(run_dir)


def losses(run_dir: Path) -> dict[int, float]:
    """Return training losses by step, where repeated steps count once."""
    lines = read_journal(run_dir / METRICS)
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def _command(base: Path, rows: Path, run_dir: Path, *more: str) -> list[str]:
    words = [sys.executable, "-m", "hetjax.train", str(base), "--simulate"]
    words += ["--run-dir", str(run_dir), "--data.path", str(rows)]
    words += ["--steps", str(STEPS), "--seq-len", str(SEQ_LEN)]
    words += ["--global-batch", str(GLOBAL_BATCH), "--dtype", "float32"]
    words += ["--checkpoint.every", str(CHECKPOINT_EVERY)]
    words += ["--optimizer.learning-rate", str(LEARNING_RATE)]
    words += ["--optimizer.schedule", "constant", "--optimizer.warmup-steps", "0"]
    words += ["--evaluation.every", "0", "--evaluation.sample-tokens", "0"]
    return [*words, *more]


def _killed(words: Sequence[str], run_dir: Path) -> None:
    """Start, and kill (SIGKILL) after KILLED_AT steps."""
    running = subprocess.Popen(words, stdout=sys.stderr, env=os.environ)
    until_s = time.monotonic() + _LIMIT_S
    try:
        while max(losses(run_dir), default=0) < KILLED_AT:
            if running.poll() is not None or time.monotonic() > until_s:
                raise SystemExit(f"the run ended before step {KILLED_AT}: {words}")
            time.sleep(_LOOK_S)
    finally:
        running.kill()
        running.wait()
