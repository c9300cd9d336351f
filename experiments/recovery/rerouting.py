# SPDX-License-Identifier: Apache-2.0
"""Measures how long a step takes when a replica dies in it and the others take over.

    python -m experiments.recovery.rerouting [--plan NAME ...] [--kills 3]

Runs worker processes on this machine with `--reroute`; their devices take a set time
for a microbatch (`sleeping_worker.py`). After some steps a worker is killed during a
step, at one of several moments spread over it. `broken_step_s` is from the kill to the
end of that step: the others restart it with all samples once their devices have
finished their pending work. `next_step_s` is the step after it. Both are compared with
`bound_s`: 1.6 x the step time before x old throughput / throughput of the remaining
replicas. When the lost worker returns, its state is moved while all wait: `back` says
how long that takes, by phase, and how long a step takes then. Prints one JSON object.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from experiments.islands import models
from experiments.recovery.kills import workers
from experiments.recovery.sleeping_worker import DEVICE_S
from experiments.recovery.trial import TrialContext
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.cluster.cluster import Cluster, Node
from hetjax.data.dataset import Dataset
from hetjax.launchers.local_processes import OnThisMachine
from hetjax.models.presets import model_preset
from hetjax.plans.plan import Plan, Replica
from hetjax.runtime.control.controller import Controller
from hetjax.training.directory.rundir import LOGS
from hetjax.training.recovery.driver import Driver
from hetjax.training.recovery.driver_config import DriverConfig
from hetjax.training.recovery.loss_scaling import LossScaling
from hetjax.training.recovery.membership import Membership
from hetjax.training.recovery.recovered import Recovered, Rerouted
from hetjax.training.recovery.standby_plans import StandbyPlans
from hetjax.training.recovery.step_checking import SpikeRule, StepChecking
from hetjax.training.settings.config import RunConfig

MODEL = "gpt-2x64"
FACTOR = 1.6  # required limit: times what the remaining throughput allows
_STEPS = 4  # before the kill; the first one is not counted
_LONGEST_S = 300.0  # until the lost worker is back
_STANDBY_S = 1.0  # until standby workers are started


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A plan, the time of a microbatch on each node, and the node that dies."""

    title: str
    replicas: tuple[Replica, ...]
    device_s: Mapping[str, float]
    killed: str

    @property
    def plan(self) -> Plan:
        return models.plan_of(model_preset(MODEL), *self.replicas)

    @property
    def throughput_ratio(self) -> float:
        """Throughput of all replicas over that of the remaining replicas."""
        left = [
            r for r in self.replicas if all(s.node != self.killed for s in r.stages)
        ]
        return sum(map(self._samples_per_s, self.replicas)) / sum(
            map(self._samples_per_s, left)
        )

    def _samples_per_s(self, replica: Replica) -> float:
        """Return the throughput of a pipeline that fills and drains once a step."""
        slowest_s = max(self.device_s[stage.node] for stage in replica.stages)
        slots = replica.num_microbatches + len(replica.stages) - 1
        samples = replica.num_microbatches * replica.microbatch_size
        return samples / (slots * slowest_s)


def pipeline(*nodes: str, count: int) -> Replica:
    return models.pipeline(model_preset(MODEL), nodes, count, 1)


CASES = {
    "two-equal": Case(
        title="one of two equal replicas",
        replicas=(pipeline("a", count=6), pipeline("b", count=6)),
        device_s={"a": 0.5, "b": 0.5},
        killed="b",
    ),
    "two-unequal": Case(
        title="the larger of two unequal replicas",
        replicas=(pipeline("a", count=8), pipeline("b", count=4)),
        device_s={"a": 0.375, "b": 0.75},
        killed="a",
    ),
    "two-depths": Case(
        title="a stage of a pipeline beside a replica on one device",
        replicas=(pipeline("a", "b", count=5), pipeline("c", count=6)),
        device_s={"a": 0.5, "b": 0.5, "c": 0.5},
        killed="b",
    ),
    "three-equal": Case(
        title="one of three equal replicas",
        replicas=tuple(pipeline(node, count=6) for node in "abc"),
        device_s={"a": 0.5, "b": 0.5, "c": 0.5},
        killed="c",
    ),
}


def _cluster(case: Case) -> Cluster:
    nodes = tuple(
        Node(
            name=name,
            device="core",
            count=1,
            peak_tflops=0.05,
            memory_gib=4.0,
            memory_gb_per_s=10.0,
            intra_node_gb_per_s=10.0,
            network_gbit_per_s=1.0,
        )
        for name in case.device_s
    )
    return Cluster(name="here", nodes=nodes)


def _nobody_looks(*_: object) -> NoReturn:
    raise AssertionError("plans for other clusters are not asked for")


class Trial:
    """A run of the case on its own workers."""

    def __init__(
        self, case: Case, folder: Path, dataset: Dataset, stack: ExitStack
    ) -> None:
        self._case, self._folder = case, folder
        self._heard: list[Recovered | Rerouted] = []
        cluster, plan = _cluster(case), case.plan
        config = RunConfig(
            model=MODEL,
            run_dir=folder,
            steps=1000,
            seq_len=plan.seq_len,
            global_batch=plan.global_batch,
            dtype="float32",
            simulate=True,
        )
        launcher = OnThisMachine(
            folder / LOGS,
            stack,
            module="experiments.recovery.sleeping_worker",
            standby_after_s=_STANDBY_S,
        )
        driver_config = DriverConfig(
            context=TrialContext(config, dataset),
            checking=StepChecking(SpikeRule(factor=2.0, window=64), {}),
            loss_scaling=LossScaling(1.0, 1, lambda cluster, plan: plan),
            standby_plans=StandbyPlans(lambda cluster, now: now, _nobody_looks, 0.0),
            membership=Membership(cluster, None),
            transport="sockets",
            seed=0,
            storage=CheckpointStorage(directory=f"{folder}/disks/{{worker}}"),
            host={},
            recovery="local-first",
            reroutes=True,
        )
        controller = Controller(plan, launcher.connections, cluster.nodes)
        self._driver = Driver(
            controller, launcher, driver_config, cluster=cluster, validation_weights=()
        )
        self._driver.on_recovery = self._heard.append
        self._driver.begin()

    def measured(self, share: float) -> dict[str, Any]:
        """Kill after this share of a step; if nobody returns, `back` has no phases."""
        before_s = [self._step() for _ in range(_STEPS)][1:]
        old_s = statistics.median(before_s)
        killed_s = list[float]()
        threading.Timer(share * old_s, lambda: killed_s.append(self._kill())).start()
        self._step()
        broken_s = time.perf_counter() - killed_s[0]
        assert [type(found) for found in self._heard] == [Rerouted], self._heard
        told = self._heard.pop()
        next_s = self._step()
        end_s = time.monotonic() + _LONGEST_S
        while not self._heard and time.monotonic() < end_s:
            self._step()
        found = {
            "killed_at": share,
            "old_step_s": old_s,
            "reroute_s": sum(told.seconds.values()),
            "broken_step_s": broken_s,
            "next_step_s": next_s,
        }
        bound_s = FACTOR * old_s * self._case.throughput_ratio
        for step in ("broken", "next"):
            found[f"{step}_over_bound"] = found[f"{step}_step_s"] / bound_s
        return found | {"bound_s": bound_s, "back": self._back()}

    def _back(self) -> dict[str, float]:
        """Return how long the return of the lost worker took, and a step after that."""
        phases = {k: v for found in self._heard for k, v in found.seconds.items()}
        return phases | {"stood_s": sum(phases.values()), "step_s": self._step()}

    def _step(self) -> float:
        begin_s = time.perf_counter()
        self._driver.step(self._driver.at)
        return time.perf_counter() - begin_s

    def _kill(self) -> float:
        os.kill(workers(self._folder)[self._case.killed], signal.SIGKILL)
        return time.perf_counter()


def tried(case: Case, dataset: Dataset, share: float) -> dict[str, Any]:
    environment = {DEVICE_S: json.dumps(dict(case.device_s))}
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, environment),
        ExitStack() as stack,
    ):
        return Trial(case, Path(folder), dataset, stack).measured(share)


def summary(case: Case, trials: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "title": case.title,
        "throughput_ratio": case.throughput_ratio,
        "worst_broken_over_bound": max(t["broken_over_bound"] for t in trials),
        "worst_next_over_bound": max(t["next_over_bound"] for t in trials),
        "trials": trials,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.recovery.rerouting",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plan", action="append", choices=[*CASES])
    parser.add_argument("--kills", type=int, default=3, help="moments, for each plan")
    given = parser.parse_args()
    shares = [(at + 0.5) / given.kills for at in range(given.kills)]
    found, words = {}, " ".join(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        vocab_size = model_preset(MODEL).vocab_size
        dataset = models.own_sources(Path(folder), vocab_size)
        for name in given.plan or CASES:
            case = CASES[name]
            trials = [tried(case, dataset, share) for share in shares]
            found[name] = summary(case, trials)
            print(json.dumps(found[name]), file=sys.stderr, flush=True)
    told = {
        "command": f"python -m experiments.recovery.rerouting {words}".strip(),
        "factor": FACTOR,
        "plans": found,
        "load": os.getloadavg()[0],
    }
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
