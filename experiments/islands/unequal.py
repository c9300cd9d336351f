# SPDX-License-Identifier: Apache-2.0
"""Measured against predicted: pipelines over hosts of unequal speed and links.

    python -m experiments.islands.unequal --host a:80 --host b:40 --host c:40
    python -m experiments.islands.unequal --host a:40 ... --layouts even --link-mbit 100

Stands up the hosts as a testbed (`experiments/testbed`: CPU quotas in percent of a
core, namespaces, shaped links; needs root), measures the model's layers on each host
under its quota, plans with that profile, and runs the layouts in turn, each with a
worker process per host. `even` is one pipeline over all hosts, blocks shared out
evenly; `even-1f1b` the same with 1F1B instead of H-1F1B. `alone` is what each host
reaches by itself with the whole model and its share of the batch; the sum over hosts is
what no layout of theirs should pass. A worker computes with one thread
(`PJRT_NPROC=1`): more would wait for each other at the expense of the quota. Prints one
JSON object; times are medians over steps, and each layout runs its steps in rounds that
alternate with the others'.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from experiments.islands import models
from experiments.testbed.__main__ import host_of
from experiments.testbed.hosts import Host, Testbed
from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.cluster.files import cluster_toml
from hetjax.costs.profile import Profile
from hetjax.costs.profile_files import read_profile, write_profile
from hetjax.data.dataset import Dataset
from hetjax.errors import NoFeasiblePlan
from hetjax.models.presets import model_preset
from hetjax.planner.baselines.table import compared
from hetjax.planner.find import find_plan
from hetjax.planner.judge import judged
from hetjax.planner.request import Request
from hetjax.plans.plan import Plan
from hetjax.schedule.predicted import Predicted
from hetjax.training.config import RunConfig
from hetjax.training.launching import Place, on_this_machine
from hetjax.training.optimizer import optimizer
from hetjax.training.worker import worker_settings

_LATENCY_MS = 0.3  # of a message between two processes here
_MOST_MBIT_PER_S = 8000.0  # of a link that nobody limits
LAYOUTS = ("planned", "megatron", "whale")


def cluster_of(hosts: Sequence[Host]) -> Cluster:
    """One device a host; the figures are only there to be complete: a profile rules."""
    nodes = tuple(
        Node(
            name=host.name,
            device=f"core-{host.cpu_percent or 100:g}",
            count=1,
            peak_tflops=0.05,
            memory_gib=4.0,
            memory_gb_per_s=10.0,
            intra_node_gb_per_s=10.0,
            network_gbit_per_s=10.0,
        )
        for host in hosts
    )
    links = tuple(
        Link(
            between=(one.name, other.name),
            bandwidth_gbit_per_s=min(
                (h.egress_mbit_per_s or _MOST_MBIT_PER_S) / 1000 for h in (one, other)
            ),
            latency_ms=_LATENCY_MS,
        )
        for n, one in enumerate(hosts)
        for other in hosts[n + 1 :]
    )
    return Cluster(name="testbed", nodes=nodes, links=links)


def profiled(
    testbed: Testbed, cluster: Cluster, model: str, sizes: Sequence[int], folder: Path
) -> Profile:
    """Measure the layers on each host, under its quota, one host after the other."""
    output = folder / "profile.json"
    for node in cluster.nodes:
        file = folder / f"{node.name}.toml"
        file.write_text(cluster_toml(replace(cluster, nodes=(node,), links=())))
        words = [sys.executable, "-m", "experiments.islands.models", "profile", model]
        words += ["--cluster", str(file), "--simulate", "--output", str(output)]
        words += ["--microbatch-sizes", ",".join(map(str, sizes))]
        words += ["--tensor", "1", "--remat", "none"]
        subprocess.run(
            [*testbed.prefix(node.name), *words],
            check=True,
            stdout=sys.stderr,
            env=dict(os.environ),
        )
    profile = replace(read_profile(output), links=())
    write_profile(output, profile)
    return profile


def layouts(
    request: Request, names: Sequence[str], budget_s: float
) -> dict[str, Predicted]:
    """Predicted layouts by name."""
    baselines = [name for name in names if name in ("megatron", "whale")]
    found: dict[str, Predicted] = {
        name: predicted
        for name, predicted in compared(request, baselines).items()
        if not isinstance(predicted, NoFeasiblePlan)
    }
    if "planned" in names:
        found["planned"] = find_plan(request, polish_s=budget_s).best
    every = [node.name for node in request.cluster.nodes]
    size = max(request.microbatch_sizes)
    batches = request.global_batch // size
    even = models.plan_of(
        request.model, models.pipeline(request.model, every, batches, size)
    )
    for name, schedule in (("even", "h1f1b"), ("even-1f1b", "1f1b")):
        if name in names:
            found[name] = judged(request, even, schedule)
    return {name: found[name] for name in names if name in found}


class Running:
    """A layout on its workers, ready to be timed."""

    def __init__(
        self,
        plan: Plan,
        testbed: Testbed,
        config: RunConfig,
        cluster: Cluster,
        dataset: Dataset,
        folder: Path,
        stack: ExitStack,
    ) -> None:
        self._fleet = on_this_machine(
            plan,
            folder / "logs",
            stack,
            places={
                host.name: Place(
                    prefix=tuple(testbed.prefix(host.name)),
                    address=testbed.address(host.name),
                )
                for host in testbed.hosts
            },
            address=testbed.controller_address,
            module="experiments.islands.worker",
        )
        own = replace(config, global_batch=plan.global_batch)
        self._fleet.build(worker_settings(own, cluster_toml(cluster), plan, dataset))
        self._fleet.connect()
        self._fleet.compile()
        self._fleet.initialise(0)
        self._step, self.step_s = 0, []

    def run(self, num_steps: int, *, counts: bool) -> None:
        for _ in range(num_steps):
            start_s = time.perf_counter()
            self._fleet.step(self._step)
            self._step += 1
            if counts:
                self.step_s.append(time.perf_counter() - start_s)

    def end(self) -> None:
        self._fleet.end()


def measured(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    hosts = [
        replace(host, egress_mbit_per_s=host.egress_mbit_per_s or given.link_mbit)
        for host in map(host_of, given.host)
    ]
    config = models.preset(given.model).config
    model = model_preset(given.model)
    dataset = models.own_sources(folder, model.vocab_size)
    with Testbed(hosts, quota_less=given.quota_less) as testbed:
        cluster = cluster_of(hosts)
        profile = profiled(testbed, cluster, given.model, given.sizes, folder)
        request = Request(
            model=model,
            cluster=cluster,
            seq_len=config.seq_len,
            global_batch=given.global_batch,
            dtype=config.dtype,
            optimizer=optimizer(config.optimizer, config.steps).init,
            profile=profile,
            microbatch_sizes=tuple(given.sizes),
            tensor_degrees=(1,),
            remats=("none",),
        )
        found = layouts(request, given.layouts, given.budget_s)
        alone = {} if given.no_alone else _alone(request)

        def start(name: str, plan: Plan, stack: ExitStack) -> Running:
            print(f"starting {name}", file=sys.stderr, flush=True)
            own = folder / name
            return Running(plan, testbed, config, cluster, dataset, own, stack)

        rows = _timed({n: p.plan for n, p in found.items()}, start, given)
        single = _timed({n: p.plan for n, p in alone.items()}, start, given)
    return _told(given, found, rows, alone, single, config.seq_len)


def _alone(request: Request) -> dict[str, Predicted]:
    """Each host by itself, the whole model in one stage."""
    found, size = {}, max(request.microbatch_sizes)
    for node in request.cluster.nodes:
        cluster = replace(request.cluster, nodes=(node,), links=())
        part = replace(request, cluster=cluster, global_batch=2 * size)
        replica = models.pipeline(request.model, [node.name], 2, size)
        found[node.name] = judged(part, models.plan_of(request.model, replica))
    return found


def _timed(
    plans: Mapping[str, Plan], start: Any, given: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of steps by name; rounds alternate."""
    with ExitStack() as ends:
        running: dict[str, Running] = {}
        for name, plan in plans.items():
            running[name] = start(name, plan, ends)
        for layout in running.values():
            layout.run(2, counts=False)
        for _ in range(given.rounds):
            for layout in running.values():
                layout.run(1, counts=False)
                layout.run(given.steps, counts=True)
        for layout in running.values():
            layout.end()
        return {name: layout.step_s for name, layout in running.items()}


def _told(
    given: argparse.Namespace,
    found: Mapping[str, Predicted],
    rows: Mapping[str, Sequence[float]],
    alone: Mapping[str, Predicted],
    single: Mapping[str, Sequence[float]],
    seq_len: int,
) -> dict[str, Any]:
    def row(predicted: Predicted, steps_s: Sequence[float]) -> dict[str, Any]:
        step_s, tokens = median(steps_s), predicted.plan.global_batch * seq_len
        expected_s = predicted.simulation.step_time_s
        return {
            "step_s": step_s,
            "predicted_s": expected_s,
            "over_predicted": step_s / expected_s,
            "tokens_per_s": tokens / step_s,
            "steps_s": [round(s, 4) for s in steps_s],
        }

    told = {name: row(found[name], rows[name]) for name in found}
    hosts = {name: row(alone[name], single[name]) for name in alone}
    together = sum(entry["tokens_per_s"] for entry in hosts.values())
    for entry in told.values():
        entry["of_alone_together"] = together and entry["tokens_per_s"] / together
    best = told.get("planned", {}).get("tokens_per_s")
    return {
        "hosts": given.host,
        "link_mbit_per_s": given.link_mbit,
        "model": given.model,
        "global_batch": given.global_batch,
        "layouts": told,
        "planned_over": {
            name: best / entry["tokens_per_s"]
            for name, entry in told.items()
            if best and name != "planned"
        },
        "alone": hosts,
        "load": os.getloadavg()[0],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", action="append", required=True)
    parser.add_argument("--link-mbit", type=float, help="of all hosts that give none")
    parser.add_argument("--model", default="gpt-8x256", choices=models.CONFIGS)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    parser.add_argument("--budget-s", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of a round")
    parser.add_argument("--no-alone", action="store_true")
    parser.add_argument("--quota-less", action="store_true")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "PJRT_NPROC": "1",
            # a slow host need not compile what a faster one has
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        print(json.dumps(measured(given, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
