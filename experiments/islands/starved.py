# SPDX-License-Identifier: Apache-2.0
"""Starves hosts of CPU time: the controller must not take them for dead.

    python -m experiments.islands.starved [--times 20] [--percent 5] [--at-once 5]

Each time, two hosts of a testbed (CPU quotas; needs root) start a worker each, compile
their halves of a model with nothing cached, and train. No loss may be reported. Then
one of the two is stopped (SIGSTOP) or killed (SIGKILL), in turn, and the time until the
controller knows is measured. Each result is written to --output at once; a later start
of the command runs only those that are missing.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.islands import models
from experiments.islands.unequal import cluster_of
from experiments.testbed.hosts import Host, Testbed
from hetjax.cluster.cluster import part_of
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.launchers.launcher import start_workers
from hetjax.launchers.local_processes import OnThisMachine, WorkerPlace
from hetjax.models.presets import model_preset
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.rpc.worker_connections import WorkerLost
from hetjax.training.worker import worker_settings

MODEL = "gpt-2x64"
_STEPS = 3
_MICROBATCHES = 4
_LONGEST_S = 30.0  # until a lost worker must be known
_LIMITS_S = {"SIGSTOP": 10.0, "SIGKILL": 1.0}


def one(number: int, slot: int, testbed: Testbed, folder: Path) -> dict[str, Any]:
    """Compile and train on the two hosts of a slot, then lose one of them."""
    nodes = [f"{name}{slot}" for name in "ab"]
    begin_s = time.monotonic()
    row: dict[str, Any] = {"number": number, "false_loss": None}
    with ExitStack() as stack:
        try:
            controller = compiled(nodes, testbed, folder, stack)
            row["compiled_s"] = round(time.monotonic() - begin_s, 1)
            for step in range(_STEPS):
                controller.step(step)
            row["trained_s"] = round(time.monotonic() - begin_s, 1)
        except WorkerLost as lost:
            return row | {"false_loss": str(lost)}
        how = [signal.SIGSTOP, signal.SIGKILL][number % 2]
        victim = random.Random(number).choice(nodes)
        row |= {"how": how.name, "told_s": told_s(controller, testbed, victim, how)}
    return row


def compiled(
    nodes: Sequence[str], testbed: Testbed, folder: Path, stack: ExitStack
) -> Controller:
    """Start a worker on each node and compile half of the model there, uncached."""
    launcher = OnThisMachine(
        folder / "logs",
        stack,
        places={
            node: WorkerPlace(
                prefix=tuple(testbed.prefix(node)), address=testbed.address(node)
            )
            for node in nodes
        },
        address=testbed.controller_address,
        module="experiments.islands.worker",
    )
    model, config = model_preset(MODEL), models.preset(MODEL).config
    plan = models.plan_of(model, models.pipeline(model, nodes, _MICROBATCHES, 1))
    dataset = models.own_sources(folder, model.vocab_size)
    own = replace(
        config,
        global_batch=plan.global_batch,
        data=replace(config.data, cache_dir=folder / "cache"),
    )
    cluster = cluster_toml(part_of(cluster_of(testbed.hosts), nodes))
    controller = start_workers(launcher, plan)
    controller.build(worker_settings(own, cluster, plan, dataset))
    controller.connect()
    controller.compile()
    controller.initialise(0)
    return controller


def told_s(
    controller: Controller, testbed: Testbed, victim: str, how: signal.Signals
) -> float:
    """Return the seconds from a signal to a worker until its controller knows of it."""
    (pid,) = filter(is_worker, testbed.members(victim))
    begin_s = time.monotonic()
    os.kill(pid, how)
    while victim in controller.connections.workers:
        if time.monotonic() - begin_s > _LONGEST_S:
            raise RuntimeError(f"nobody knows of the end of {victim}")
        time.sleep(0.005)
    return round(time.monotonic() - begin_s, 3)


def is_worker(pid: int) -> bool:
    """Whether it is a worker itself, and not its heart (`hetjax/comm/heart.py`)."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"experiments.islands.worker" in words


def measured(given: argparse.Namespace) -> None:
    slots = range(given.at_once)
    hosts = [
        Host(name=f"{n}{s}", cpu_percent=given.percent) for s in slots for n in "ab"
    ]
    done = json.loads(given.output.read_text())["rows"] if given.output.exists() else []
    left = iter(sorted({*range(given.times)} - {row["number"] for row in done}))
    lock = threading.Lock()

    def work(slot: int, testbed: Testbed) -> None:
        while True:
            with lock:
                number = next(left, None)
            if number is None:
                return
            with tempfile.TemporaryDirectory() as folder:
                row = one(number, slot, testbed, Path(folder))
            with lock:
                done.append(row | {"load": round(os.getloadavg()[0], 1)})
                print(json.dumps(done[-1]), file=sys.stderr, flush=True)
                given.output.write_text(json.dumps(summary(given, done), indent=1))

    with (
        Testbed(hosts, name="starved") as testbed,
        ThreadPoolExecutor(len(slots)) as pool,
    ):
        for ended in [pool.submit(work, slot, testbed) for slot in slots]:
            ended.result()


def summary(
    given: argparse.Namespace, rows: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    told = [row for row in rows if "told_s" in row]
    return {
        "cpu_percent": given.percent,
        "at_once": given.at_once,
        "times": len(rows),
        "false_losses": sum(row["false_loss"] is not None for row in rows),
        "longest_told_s": {
            how: max((r["told_s"] for r in told if r["how"] == how), default=None)
            for how in _LIMITS_S
        },
        "within_limits": all(r["told_s"] <= _LIMITS_S[r["how"]] for r in told),
        "rows": sorted(rows, key=lambda row: row["number"]),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--percent", type=float, default=5.0, help="of a core, a host")
    parser.add_argument("--at-once", type=int, default=5)
    output = Path("experiments/results/islands_starved.json")
    parser.add_argument("--output", type=Path, default=output)
    os.environ |= {"PJRT_NPROC": "1"}
    measured(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
