# SPDX-License-Identifier: Apache-2.0
"""Trains on the card and its machine's CPU as two islands of one job; kills either.

First compares the gradients of a pipeline over both, in this process, with those of one
stage on the CPU. Then trains preset `tiny` on two worker processes. The planner makes
the plan for a cluster in which no node has the memory for the whole model, so the plan
uses both nodes. The run is repeated twice: in one the CPU's worker is killed, in the
other the card's. Owns the clusters, the kills, and the comparison of runs.
"""

import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
import optax

from experiments.benchmarks.one_jit import even_pipeline, random_batch
from experiments.gpu.models.tiny_run import RunSize, furthest, losses, tiny_arguments
from experiments.gpu.models.words import in_words
from experiments.gpu.processes.background import Background, ending, python_module
from experiments.gpu.processes.compiling import noted, quickly
from experiments.gpu.rows import Row
from experiments.gpu.setting import OutOfTime, Setting
from experiments.recovery.kills import workers
from hetjax.cluster.catalogue import device_spec
from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.discovery import device_name
from hetjax.cluster.memory_budget import plan_bytes
from hetjax.data.batches import Batch
from hetjax.models.presets import model_preset
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import find_plan
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.plans.plan_files import write_plan
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.schedule.predicted import Predicted
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.rundir import EVENTS, METRICS

CARD, HOST = "card", "host"  # the nodes, and their workers
_LOST = {HOST: "CPU's worker", CARD: "card's worker"}
_USUAL = RunSize(steps=60, seq_len=64, microbatches=8, microbatch_size=2)
_QUICK = RunSize(steps=24, seq_len=16, microbatches=4, microbatch_size=2)
_KILLED_AFTER = 8  # steps
_SAVED_EVERY = 2  # steps: with one pipeline, lost state is restored from disk
_MEMORY = 0.75  # each node's memory, as a share of what the whole model needs
_LOOK_S = 0.01
_KEPT_S = 1.0  # left for the rows after a run that does not end


def measure(setting: Setting) -> Iterator[Row]:
    size = setting.choose(_USUAL, _QUICK)
    cluster = cluster_of_two_kinds(setting.device)
    request = _request(cramped(cluster, size), size)
    planned = find_plan(request, local_work=5_000).best
    with setting.scratch() as folder:
        job = Job(setting, folder, cluster, planned, size)
        with job.started("whole") as run:
            yield _gradients(setting.device)  # meanwhile
            yield Row(
                what="the plan has stages on both kinds",
                measured=planned.plan.nodes == {CARD, HOST},
                note=in_words(planned.plan),
            )
            yield from _runs(job, run)


def _gradients(device: jax.Device) -> Row:
    """Compare a two-stage pipeline on device and CPU with one stage on the CPU."""
    model = model_preset("tiny")
    cpu = jax.local_devices(backend="cpu")[-1]  # not `device`, if possible
    first, last = (0, len(model.layers) // 2), (len(model.layers) // 2, 6)
    whole = even_pipeline(model, 1, microbatches=2, size=2)
    stages = (_stage(CARD, first, 2), _stage(HOST, last, 1))
    (replica,) = whole.replicas
    both = replace(whole, replicas=(replace(replica, stages=stages),))
    batch = random_batch(whole, model.vocab_size)
    with jax.default_matmul_precision("highest"):
        found = _gradients_by(both, {CARD: [device], HOST: [cpu]}, batch)
        expected = _gradients_by(whole, {"node": [cpu]}, batch)
    errors = {
        name: float(np.linalg.norm(found[name] - value) / np.linalg.norm(value))
        for name, value in expected.items()
    }
    return Row(
        what="gradients of both kinds in one pipeline, furthest from the CPU's",
        measured=max(errors.values()),
        unit="of a parameter's norm",
        note="float32, products in full precision; worst: "
        f"{max(errors, key=errors.__getitem__)}",
    )


def _stage(node: str, layers: tuple[int, int], launch_ahead: int) -> Stage:
    return Stage(node=node, devices=(0,), layers=layers, launch_ahead=launch_ahead)


def _gradients_by(
    plan: Plan, nodes: Mapping[str, list[jax.Device]], batch: Batch
) -> dict[str, np.ndarray]:
    """Return one step's gradients; optax.trace without decay keeps them as state."""
    model = model_preset(plan.model)
    runtime = StageRuntime(plan, model, nodes, optax.trace(decay=0.0))
    runtime.initialise(0)
    runtime.step(0, batch)
    kept = {e.name: v for e, v in runtime.entries() if e.name.startswith("opt.")}
    runtime.close()
    return kept


def cluster_of_two_kinds(device: jax.Device) -> Cluster:
    """Return the device and the CPU as nodes."""
    nodes = (
        Node(name=CARD, device=device_name(device), count=1),
        Node(name=HOST, device="cpu", count=1),
    )
    return Cluster(name="two kinds", nodes=nodes)


def cramped(cluster: Cluster, size: RunSize) -> Cluster:
    """Return the cluster with too little memory for all of `tiny` on any node."""
    nodes = tuple(_cramped(node, size) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)


def _cramped(node: Node, size: RunSize) -> Node:
    """Return the node with `_MEMORY` of the memory that the whole model needs there."""
    model = model_preset("tiny")
    replica = Replica(
        num_microbatches=size.microbatches,
        microbatch_size=size.microbatch_size,
        stages=(_stage(node.name, (0, len(model.layers)), 1),),
    )
    plan = Plan(
        model=model.name,
        seq_len=size.seq_len,
        global_batch=size.global_batch,
        replicas=(replica,),
    )
    request = _request(Cluster(name="alone", nodes=(node,)), size)
    needed = evaluate_plan(request, plan).memory[f"{node.name}/0"].total_bytes
    bytes_per_gib = plan_bytes(device_spec(node).name, 1.0)
    return replace(node, memory_gib=_MEMORY * needed / bytes_per_gib)


def _request(cluster: Cluster, size: RunSize) -> PlanRequest:
    """Ask for a plan of `tiny` with few choices, so that it takes a second or two."""
    return PlanRequest(
        model=model_preset("tiny"),
        cluster=cluster,
        seq_len=size.seq_len,
        global_batch=size.global_batch,
        dtype="float32",
        microbatch_sizes=(size.microbatch_size,),
        tensor_degrees=(1,),
        data_degrees=(1,),
        remats=("none",),
    )


@dataclass(frozen=True, slots=True)
class Job:
    """One job, run several times, each time in its own folders."""

    setting: Setting
    folder: Path
    cluster: Cluster
    planned: Predicted
    size: RunSize

    def run_dir(self, name: str) -> Path:
        return self.folder / name

    @property
    def note(self) -> str:
        """A note on how its programs are compiled, if not in the usual way."""
        return noted(self.setting.platform)

    @contextmanager
    def started(self, name: str) -> Iterator[Background]:
        """Run it within the block; keep its log and its workers' logs."""
        logs = self.setting.logs_of("islands", self.folder)
        environment = {**os.environ, **quickly(self.setting.platform)}
        log, words = logs / f"{name}.txt", self.arguments(name)
        try:
            with python_module(log, "hetjax.train", words, environment) as run:
                yield run
        finally:
            for file in (self.run_dir(name) / "logs").glob("*.log"):
                shutil.copy(file, logs / f"{name}-{file.stem}.txt")

    def arguments(self, name: str) -> list[str]:
        """Return what follows `python -m hetjax.train`."""
        run_dir = self.run_dir(name)
        plan = run_dir.with_suffix(".json")
        write_plan(plan, self.planned.plan)
        words = ["--launcher", "processes", "--plan", str(plan), "--dtype", "float32"]
        words += ["--checkpoint.every", str(_SAVED_EVERY)]
        words += ["--platform", "cpu"] if self.setting.platform == "cpu" else []
        # later runs reuse what the first has compiled, and so get the same bits
        cache = self.folder / "cache"
        return [
            *tiny_arguments(run_dir, self.cluster, self.size, cache),
            *words,
        ]


def _runs(job: Job, run: Background) -> Iterator[Row]:
    """Yield the rows of all runs. `run` is the undisturbed one; the others start when
    it trains, and reuse what it has compiled."""
    setting, whole = job.setting, job.run_dir("whole")
    while run.process.poll() is None and not losses(whole) and _has_time(setting):
        time.sleep(_LOOK_S)
    with ThreadPoolExecutor(setting.choose(2, 1)) as pool:
        lost = [pool.submit(_run_with_loss, worker, job) for worker in _LOST]
        code = run.exit_code(setting.left_s() - _KEPT_S)
        expected = losses(whole)
        yield _whole(code, expected, run, job)
        if code == 0 and expected:
            yield _step_time(whole, job)
        ended = [each.result() for each in lost]
        for worker, found in zip(_LOST, ended, strict=True):
            yield from _recovery(worker, found, expected)
    late = [code, *(found.code for found in ended)].count(None)
    if late:
        raise OutOfTime(f"{late} of {1 + len(ended)} runs had not ended")


def _whole(code: int | None, found: list[float], run: Background, job: Job) -> Row:
    """Judge the undisturbed run; one that had no time to end says nothing."""
    is_whole = code == 0 and len(found) == job.size.steps
    why = f"{ending(code)}, {len(found)} steps; {run.tail}"
    return Row(
        what="a run on workers of both kinds ends, and its loss falls",
        measured=None if code is None else is_whole and found[-1] < found[0],
        note=f"tiny, {len(found)} steps{job.note}" if is_whole else why,
    )


def _has_time(setting: Setting) -> bool:
    return setting.left_s() > _KEPT_S


def _step_time(run_dir: Path, job: Job) -> Row:
    lines = read_journal(run_dir / METRICS)
    times_s = [line["step_time_s"] for line in lines if "step_time_s" in line]
    return Row(
        what="step of both kinds in one job",
        measured=median(times_s[len(times_s) // 2 :]),
        unit="s",
        predicted=job.planned.simulation.step_time_s,
        note=f"predicted by data sheets; the CPU's is a rough guess{job.note}",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbed:
    """A run whose worker was killed, if there was time; `tail` ends its log."""

    is_killed: bool
    code: int | None
    losses: list[float]
    recovered: list[dict[str, Any]]
    tail: str


def _run_with_loss(worker: str, job: Job) -> Disturbed:
    """Run the job and kill a worker after `_KILLED_AFTER` steps."""
    name, setting = f"without-{worker}", job.setting
    run_dir = job.run_dir(name)
    with job.started(name) as run:
        is_killed = _kill(worker, run_dir, run, setting)
        code = run.exit_code(setting.left_s() - _KEPT_S)
    events = read_journal(run_dir / EVENTS)
    return Disturbed(
        is_killed=is_killed,
        code=code,
        losses=losses(run_dir),
        recovered=[event for event in events if event["event"] == "recovered"],
        tail=run.tail,
    )


def _kill(worker: str, run_dir: Path, run: Background, setting: Setting) -> bool:
    """Kill the worker once `_KILLED_AFTER` steps are in the journal. Return False if
    the run or the time ended first."""
    while run.process.poll() is None and _has_time(setting):
        pid = workers(run_dir).get(worker)
        if pid is not None and len(losses(run_dir)) >= _KILLED_AFTER:
            os.kill(pid, signal.SIGKILL)
            return True
        time.sleep(_LOOK_S)
    return False


def _recovery(worker: str, found: Disturbed, expected: list[float]) -> Iterator[Row]:
    lost = f"the {_LOST[worker]}"
    is_back = found.is_killed and found.code == 0 and len(found.recovered) == 1
    killed = "its worker was killed" if found.is_killed else "nothing was killed"
    why = f"{killed}, {ending(found.code)}; {found.tail}"
    yield Row(
        what=f"recovers when {lost} is killed",
        measured=None if found.code is None else is_back,
        note=found.recovered[0]["reason"] if is_back else why,
    )
    if not is_back:
        return
    seconds = found.recovered[0]["seconds"]
    yield Row(
        what=f"recovery from the loss of {lost}",
        measured=sum(seconds.values()),
        unit="s",
        note=", ".join(f"{phase} {s:.2f}" for phase, s in seconds.items()),
    )
    yield Row(
        what=f"losses are those of an undisturbed run when {lost} is killed",
        measured=found.losses == expected,
        note=f"furthest apart: {furthest(found.losses, expected):.2g} of the loss",
    )
