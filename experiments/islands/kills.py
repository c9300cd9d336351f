# SPDX-License-Identifier: Apache-2.0
"""Loses workers at random moments, and measures when their loss is reported.

    python -m experiments.islands.kills [--times 30] [--silence-s 10]

Four worker processes train the model `gpt-8x256` as one pipeline and as two replicas,
in turn. At a random moment one is killed (SIGKILL) or stopped (SIGSTOP). Measures the
time until the controller has heard of the loss from every survivor. Then the lost
worker is replaced, and all start a new generation and take a step. At the end no
process and no listening port may be left. Prints one JSON object.
"""

import argparse
import json
import os
import random
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from experiments.islands import models
from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.launchers.local_processes import Processes
from hetjax.launchers.warm_standby import WorkerCommand
from hetjax.models.model import Model
from hetjax.models.presets import model_preset
from hetjax.plans.plan import Plan
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.rpc.schema import Lost
from hetjax.runtime.rpc.worker_connections import SocketConnections, WorkerLost
from hetjax.runtime.worker.bootstrap import WorkerBootstrap
from hetjax.training.worker import worker_settings

NODES = ("east", "north", "south", "west")
MODEL = "gpt-8x256"
_KILLED_LIMIT_S = 2.0  # for SIGSTOP it is the time of silence


def plans(model: Model) -> list[Plan]:
    """Return one pipeline of four stages, and two replicas of two."""
    whole = models.pipeline(model, NODES, 8, 1)
    halves = [models.pipeline(model, nodes, 4, 1) for nodes in (NODES[:2], NODES[2:])]
    return [models.plan_of(model, whole), models.plan_of(model, *halves)]


class Lab:
    """A controller and its worker processes; lost workers are replaced."""

    def __init__(self, folder: Path, silence_s: float) -> None:
        self._silence_s, self._secret = silence_s, secrets.token_bytes(32)
        self.connections = SocketConnections("127.0.0.1:0", self._secret, silence_s)
        self.processes = Processes(logs=folder / "logs")
        for node in NODES:
            self.start(node)

    def start(self, node: str) -> None:
        bootstrap = WorkerBootstrap(
            worker=node,
            controller=self.connections.address,
            listen="127.0.0.1:0",
            secret=self._secret,
            silence_s=self._silence_s,
        )
        module = "experiments.islands.worker"
        self.processes.start(
            bootstrap, WorkerCommand(module=module, environment=os.environ)
        )

    def replace(self, node: str) -> None:
        """Kill what is left of the worker, and start another."""
        old = self.processes.children[node]
        old.kill()
        old.wait()
        self.start(node)


def ready(
    lab: Lab, plan: Plan, settings: dict[str, Any], rng: random.Random
) -> Controller:
    """Return a controller whose workers, old and new, form a new generation."""
    lab.connections.wait_for(NODES)
    controller = Controller(plan, lab.connections)
    controller.build(settings)
    controller.connect(rng.choice(["sockets", "transfer"]))
    controller.compile()
    controller.initialise(0)
    return controller


def one(
    lab: Lab, plan: Plan, settings: dict[str, Any], rng: random.Random
) -> dict[str, Any]:
    """Lose a random worker at a random moment of training; return the reports."""
    controller = ready(lab, plan, settings, rng)
    begin_s = time.monotonic()
    controller.step(0)
    step_s = time.monotonic() - begin_s
    victim = rng.choice(NODES)
    how = rng.choice([signal.SIGKILL, signal.SIGSTOP])
    struck: list[float] = []

    def strike() -> None:
        struck.append(time.monotonic())
        lab.processes.children[victim].send_signal(how)

    threading.Timer(rng.uniform(0, 3 * step_s), strike).start()
    number = 1
    try:
        while True:
            controller.step(number)
            number += 1
    except WorkerLost as lost:
        told_s = time.monotonic() - struck[0]
        right = lost.worker == victim and len(lost.reports) == len(NODES) - 1
        named = all(
            m.worker == victim for m in lost.reports.values() if isinstance(m, Lost)
        )
    lab.replace(victim)
    return {
        "how": how.name,
        "victim": victim,
        "replicas": len(plan.replicas),
        "steps_before": number,
        "told_s": round(told_s, 3),
        "all_survivors_reported": right and named,
    }


def measured(times: int, silence_s: float, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    config = models.preset(MODEL).config
    model = model_preset(MODEL)
    nodes = tuple(Node(name=node, device="H20", count=1) for node in NODES)
    cluster = cluster_toml(Cluster(name="lab", nodes=nodes))
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dataset = models.own_sources(folder, model.vocab_size)
        lab = Lab(folder, silence_s)
        with lab.processes:
            try:
                for number in range(times):
                    plan = plans(model)[number % 2]
                    own = worker_settings(config, cluster, plan, dataset)
                    own["config"]["global_batch"] = plan.global_batch
                    rows.append(one(lab, plan, own, rng))
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                controller = ready(lab, plan, own, rng)
                controller.step(0)
                children = [c.pid for c in lab.processes.children.values()]
                controller.end()
            finally:
                lab.connections.close()
    left = [pid for pid in children if Path(f"/proc/{pid}").exists()]
    limits = {"SIGKILL": _KILLED_LIMIT_S, "SIGSTOP": silence_s}
    return {
        "times": times,
        "silence_s": silence_s,
        "all_reported": all(row["all_survivors_reported"] for row in rows),
        "within_limits": all(row["told_s"] <= limits[row["how"]] for row in rows),
        "told_s": {
            how: {
                "median": median(found),
                "max": max(found),
                "times": len(found),
            }
            for how in limits
            if (found := [row["told_s"] for row in rows if row["how"] == how])
        },
        "processes_left": left,
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--silence-s", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    print(json.dumps(measured(given.times, given.silence_s, given.seed), indent=1))


if __name__ == "__main__":
    main()
