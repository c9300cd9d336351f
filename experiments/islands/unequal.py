# SPDX-License-Identifier: Apache-2.0
"""Compares measured and predicted pipelines over hosts of unequal speed and links.

    python -m experiments.islands.unequal --host a:80 --host b:40 --host c:40
    python -m experiments.islands.unequal --host a:40 ... --layouts even --link-mbit 100

Sets up the hosts as a testbed (`experiments/testbed`: CPU quotas in percent of a core,
namespaces, shaped links; needs root), measures the model's layers on each host under
its quota, plans with that profile, and runs the layouts in turn, each with a worker
process per host. `even` is one pipeline over all hosts with equally many blocks each;
`even-1f1b` is the same with 1F1B instead of H-1F1B. `alone` is what each host reaches
by itself with the whole model, one host after the other; no layout should exceed the
sum over hosts. `alone_at_once` is the same with all hosts busy: the difference is lost
to the machine that they share. A worker computes with one thread (`PJRT_NPROC=1`): more
would wait for each other at the expense of the quota. Prints one JSON object. Times are
medians over steps, and the layouts and the lone hosts run their steps in rounds that
alternate.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from experiments.islands import models
from experiments.testbed.__main__ import host_of
from experiments.testbed.hosts import Host, Testbed
from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.costs.measured.layer_profile import Profile, check_values, read_profile
from hetjax.data.dataset import Dataset
from hetjax.errors import NoFeasiblePlan
from hetjax.launchers.launcher import start_workers
from hetjax.launchers.local_processes import OnThisMachine, WorkerPlace
from hetjax.mesh.process_setup import malloc_environment
from hetjax.models.presets import model_preset
from hetjax.optimizers.optimizer import optimizer
from hetjax.planner.baselines.by_name import compared
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import LOCAL_WORK, find_plan
from hetjax.plans.plan import Plan
from hetjax.schedule.predicted import Predicted
from hetjax.schedule.simulation.trace import perfetto
from hetjax.training.settings.config import RunConfig
from hetjax.training.worker import worker_settings

_MOST_MBIT_PER_S = 8000.0  # of a host without a limit
_ALONE_MICROBATCHES = 4
LAYOUTS = ("planned", "megatron", "whale")


def cluster_of(hosts: Sequence[Host]) -> Cluster:
    """Return a cluster with one device a host.

    Since a profile is used, only the nodes' network rates count. All that a host sends
    to its neighbours shares one token bucket: its network card.
    """
    nodes = tuple(
        Node(
            name=host.name,
            device=f"core-{host.cpu_percent or 100:g}",
            count=1,
            peak_tflops=0.05,
            memory_gib=4.0,
            memory_gb_per_s=10.0,
            intra_node_gb_per_s=10.0,
            network_gbit_per_s=(host.egress_mbit_per_s or _MOST_MBIT_PER_S) / 1000,
        )
        for host in hosts
    )
    return Cluster(name="testbed", nodes=nodes)


class RunsOnHosts(Protocol):
    """A testbed: what runs commands on hosts."""

    def prefix(self, host: str) -> list[str]:
        """Return the words before a command that run it on the host."""
        ...


def profiled(
    on: RunsOnHosts,
    cluster: Cluster,
    model: str,
    sizes: Sequence[int],
    folder: Path,
    *options: str,
) -> Profile:
    """Measure the layers on each host, under its quota, all hosts at the same time.

    So other load on the machine slows them as it does in training. `options` are more
    options of `hetjax.profile`.
    """
    words = ["--microbatch-sizes", ",".join(map(str, sizes)), *options]
    with ThreadPoolExecutor(len(cluster.nodes)) as pool:
        measure = lambda node: _profile(on, cluster, node, model, words, folder)  # noqa: E731
        found = list(pool.map(measure, cluster.nodes))
    kinds = {n.device: p for n, p in zip(cluster.nodes, found, strict=True)}
    measurements = tuple(m for p in kinds.values() for m in p.measurements)
    profile = replace(found[0], measurements=measurements, links=())
    check_values(profile)
    return profile


def _profile(
    on: RunsOnHosts,
    cluster: Cluster,
    node: Node,
    model: str,
    options: Sequence[str],
    folder: Path,
) -> Profile:
    file, output = folder / f"{node.name}.toml", folder / f"{node.name}.json"
    file.write_text(cluster_toml(replace(cluster, nodes=(node,))))
    words = [sys.executable, "-m", "experiments.islands.models", "profile", model]
    words += ["--cluster", str(file), "--simulate", "--output", str(output)]
    words += ["--tensor", "1", "--remat", "none", *options]
    subprocess.run(
        [*on.prefix(node.name), *words],
        check=True,
        stdout=sys.stderr,
        env=os.environ | malloc_environment(),  # as for workers
    )
    return read_profile(output)


def request_of(
    name: str,
    cluster: Cluster,
    profile: Profile,
    global_batch: int,
    sizes: Sequence[int],
) -> PlanRequest:
    """Return the request for a plan of the model as it was profiled."""
    config = models.preset(name).config
    return PlanRequest(
        model=model_preset(name),
        cluster=cluster,
        seq_len=config.seq_len,
        global_batch=global_batch,
        dtype=config.dtype,
        optimizer=optimizer(config.optimizer, config.steps).init,
        profile=profile,
        microbatch_sizes=tuple(sizes),
        tensor_degrees=(1,),
        remats=("none",),
    )


def layouts(
    request: PlanRequest, names: Sequence[str], local_work: float
) -> dict[str, Predicted]:
    """Return predicted layouts by name."""
    baselines = [name for name in names if name in ("megatron", "whale")]
    found: dict[str, Predicted] = {
        name: predicted
        for name, predicted in compared(request, baselines).items()
        if not isinstance(predicted, NoFeasiblePlan)
    }
    if "planned" in names:
        found["planned"] = find_plan(request, local_work=local_work).best
    every = [node.name for node in request.cluster.nodes]
    size = max(request.microbatch_sizes)
    batches = request.global_batch // size
    even = models.plan_of(
        request.model, models.pipeline(request.model, every, batches, size)
    )
    for name, schedule in (("even", "h1f1b"), ("even-1f1b", "1f1b")):
        if name in names:
            found[name] = evaluate_plan(request, even, schedule)
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
        launcher = OnThisMachine(
            folder / "logs",
            stack,
            places={
                host.name: WorkerPlace(
                    # outside its quota, to compile at full speed
                    prefix=tuple(testbed.network_prefix(host.name)),
                    address=testbed.address(host.name),
                )
                for host in testbed.hosts
            },
            address=testbed.controller_address,
            module="experiments.islands.worker",
        )
        self._fleet = start_workers(launcher, plan)
        own = replace(config, global_batch=plan.global_batch)
        self._fleet.build(worker_settings(own, cluster_toml(cluster), plan, dataset))
        self._fleet.connect()
        self._fleet.compile()
        testbed.hold_quotas()
        self._fleet.initialise(0)
        self._step, self.step_s = 0, []
        self.tokens_per_step = plan.tokens_per_step

    def run(self, num_steps: int, *, counts: bool) -> None:
        for _ in range(num_steps):
            start_s = time.perf_counter()
            self._fleet.step(self._step)
            self._step += 1
            if counts:
                self.step_s.append(time.perf_counter() - start_s)

    def trace(self, path: Path) -> None:
        """Write the times of the actions of one more step, for ui.perfetto.dev."""
        self._fleet.step(self._step, traced=True)
        self._step += 1
        path.write_text(json.dumps(perfetto(self._fleet.spans())))

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
        batch = given.global_batch
        request = request_of(given.model, cluster, profile, batch, given.sizes)
        found = layouts(request, given.layouts, given.local_work)
        alone = {} if given.no_alone else _alone(request)

        def start(name: str, plan: Plan, stack: ExitStack) -> Running:
            print(f"starting {name}", file=sys.stderr, flush=True)
            own = folder / name
            return Running(plan, testbed, config, cluster, dataset, own, stack)

        every = {name: p.plan for name, p in (found | alone).items()}
        steps_s, busy_s = _timed(every, start, given, list(alone))
    return _told(given, found, alone, steps_s, busy_s)


def _alone(request: PlanRequest) -> dict[str, Predicted]:
    """Return a layout for each host by itself, with the whole model in one stage."""
    found, size = {}, max(request.microbatch_sizes)
    for node in request.cluster.nodes:
        cluster = replace(request.cluster, nodes=(node,))
        batch = _ALONE_MICROBATCHES * size
        part = replace(request, cluster=cluster, global_batch=batch)
        replica = models.pipeline(request.model, [node.name], batch // size, size)
        found[node.name] = evaluate_plan(part, models.plan_of(request.model, replica))
    return found


def _timed(
    plans: Mapping[str, Plan],
    start: Any,
    given: argparse.Namespace,
    at_once: Sequence[str],
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return seconds of steps by name, in alternating rounds, then of `at_once`."""
    with ExitStack() as ends:
        running: dict[str, Running] = {}
        for name, plan in plans.items():
            running[name] = start(name, plan, ends)
        for layout in running.values():
            layout.run(1, counts=False)
        for _ in range(given.rounds):
            for layout in running.values():
                layout.run(given.steps, counts=True)
        steps_s = {name: list(layout.step_s) for name, layout in running.items()}
        if given.traces is not None:
            given.traces.mkdir(parents=True, exist_ok=True)
            for name in plans.keys() - set(at_once):
                running[name].trace(given.traces / f"{name}.trace.json")
        if at_once:
            all_busy([running[name] for name in at_once], given.steps)
        for layout in running.values():
            layout.end()
        return steps_s, {name: running[name].step_s for name in at_once}


def all_busy(running: Sequence[Running], num_steps: int) -> None:
    """Run all at the same time until each has made `num_steps` steps."""
    for layout in running:
        layout.step_s.clear()

    def run(layout: Running) -> None:
        while min(len(other.step_s) for other in running) < num_steps:
            layout.run(1, counts=True)

    with ThreadPoolExecutor(len(running)) as pool:
        list(pool.map(run, running))


def _told(
    given: argparse.Namespace,
    found: Mapping[str, Predicted],
    alone: Mapping[str, Predicted],
    steps_s: Mapping[str, Sequence[float]],
    busy_s: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    def row(predicted: Predicted, steps_s: Sequence[float]) -> dict[str, Any]:
        step_s, tokens = median(steps_s), predicted.plan.tokens_per_step
        expected_s = predicted.simulation.step_time_s
        return {
            "step_s": step_s,
            "predicted_s": expected_s,
            "over_predicted": step_s / expected_s,
            "tokens_per_s": tokens / step_s,
            "steps_s": [round(s, 4) for s in steps_s],
        }

    told = {name: row(p, steps_s[name]) for name, p in found.items()}
    hosts = {name: row(p, steps_s[name]) for name, p in alone.items()}
    together = sum(entry["tokens_per_s"] for entry in hosts.values())
    for name, entry in told.items():
        entry["replicas"] = _in_words(found[name].plan)
        entry["of_alone_together"] = together and entry["tokens_per_s"] / together
    busy = sum(row(p, busy_s[name])["tokens_per_s"] for name, p in alone.items())
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
        "alone_at_once_over_alone": together and busy / together,
        "load": os.getloadavg()[0],
    }


def _in_words(plan: Plan) -> list[str]:
    """Describe each replica: its microbatches, and the layers of its stages."""
    return [
        f"{r.num_microbatches} x {r.microbatch_size}: "
        + ", ".join(f"{s.node} {s.layers[0]}-{s.layers[1]}" for s in r.stages)
        for r in plan.replicas
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", action="append", required=True)
    parser.add_argument("--link-mbit", type=float, help="of all hosts that give none")
    parser.add_argument("--model", default="gpt-8x256", choices=models.CONFIGS)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    parser.add_argument("--local-work", type=float, default=LOCAL_WORK)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of a round")
    parser.add_argument("--traces", type=Path, help="folder for a step of each layout")
    parser.add_argument("--no-alone", action="store_true")
    parser.add_argument("--quota-less", action="store_true")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "PJRT_NPROC": "1",
            # a slow host need not compile what a faster one has compiled
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        print(json.dumps(measured(given, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
