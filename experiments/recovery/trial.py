# SPDX-License-Identifier: Apache-2.0
"""Runs one trial of the recovery experiment: workers on hosts, and a change.

Owns the run (the scenario gives its plans at once), the change, and the times of what
follows. Does not own scenarios (`scenarios.py`), hosts and the cloud, nor the
comparison (`speed.py`).
"""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any, Literal

from experiments.recovery.cloud_host import BUCKET
from experiments.recovery.kills import workers
from experiments.recovery.scenarios import DEVICES, NODES, Scenario
from experiments.testbed.hosts import Testbed
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.checkpoint.stored_steps import committed_steps
from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.cluster_files import cluster_toml, load_cluster
from hetjax.data.dataset import Dataset
from hetjax.errors import NoFeasiblePlan
from hetjax.launchers.local_processes import OnThisMachine, WorkerPlace
from hetjax.plans.plan import Plan
from hetjax.runtime.control.controller import Controller
from hetjax.training.directory.rundir import LOGS
from hetjax.training.recovery.driver import Driver
from hetjax.training.recovery.driver_config import DriverConfig, RunContext
from hetjax.training.recovery.loss_scaling import LossScaling
from hetjax.training.recovery.membership import Membership
from hetjax.training.recovery.recovered import Recovered, Rerouted, RolledBack
from hetjax.training.recovery.standby_plans import StandbyPlans
from hetjax.training.recovery.step_checking import SpikeRule, StepChecking
from hetjax.training.settings.config import RunConfig
from hetjax.training.worker import worker_settings

Recovery = Literal["local-first", "cloud-only"]
_INTO_STEP_S = 0.3
_SAVED = 3  # the step of the checkpoint
_SOON_S, _FORESEEN_S = 0.01, 25.0  # until standby plans are sought, and are compiled
_STANDBY_S = 5.0  # until standby workers are started
_UPLOAD_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Where trials run: hosts with links of this rate, and a cloud."""

    testbed: Testbed
    config: RunConfig
    dataset: Dataset
    folder: Path
    peer_bytes_per_s: float


def cluster_of(names: Sequence[str]) -> Cluster:
    nodes = tuple(
        Node(
            name=name,
            device="core",
            count=DEVICES,
            peak_tflops=0.05,
            memory_gib=4.0,
            memory_gb_per_s=10.0,
            intra_node_gb_per_s=10.0,
            network_gbit_per_s=1.0,
        )
        for name in names
    )
    return Cluster(name="testbed", nodes=nodes)


def _after(scenario: Scenario, cluster: Cluster) -> Plan:
    """Return the scenario's plan. Raises NoFeasiblePlan if its nodes are not there."""
    nodes = scenario.after.nodes
    there = {node.name for node in cluster.nodes}
    if not nodes <= there:
        raise NoFeasiblePlan(
            got=f"{', '.join(sorted(there))} alone",
            allowed=f"{', '.join(sorted(nodes))}",
            fix="none is needed",
        )
    return scenario.after


class _Foreseen:
    """The scenario's plan for each of the likely clusters, known at once."""

    def __init__(self, scenario: Scenario, clusters: Sequence[Cluster]) -> None:
        self._fresh: list[tuple[Cluster, Plan]] = []
        for cluster in clusters:
            with suppress(NoFeasiblePlan):
                self._fresh.append((cluster, _after(scenario, cluster)))

    def found(self) -> list[tuple[Cluster, Plan]]:
        fresh, self._fresh = self._fresh, []
        return fresh

    def close(self) -> None: ...


class TrialContext(RunContext):
    """A run whose workers are built from these settings, on this text."""

    def __init__(self, config: RunConfig, dataset: Dataset) -> None:
        self._config, self._dataset = config, dataset

    def worker_settings(self, cluster: Cluster, plan: Plan) -> Mapping[str, Any]:
        text = cluster_toml(cluster)
        return worker_settings(self._config, text, plan, self._dataset)

    def compile(
        self, controller: Controller, cluster: Cluster, *, is_first: bool
    ) -> None:
        controller.compile()


class Trial:
    """A run on its own workers, with a cluster file that may be changed."""

    def __init__(
        self,
        site: Site,
        scenario: Scenario,
        recovery: Recovery,
        stack: ExitStack,
        reroutes: bool,
    ) -> None:
        self._scenario = scenario
        self._folder = Path(tempfile.mkdtemp(dir=site.folder))
        stack.callback(rmtree, self._folder, ignore_errors=True)
        storage = CheckpointStorage(
            directory=f"{self._folder}/disks/{{worker}}",
            cloud=f"gs://{BUCKET}/{self._folder.name}",
        )
        self._store, self._storage = storage.store(), storage
        self._file = self._folder / "cluster.toml"
        self._join(tuple({s.node: 0 for _, _, s in scenario.before.stages()}))
        launcher = OnThisMachine(
            self._folder / LOGS,
            stack,
            places={
                name: WorkerPlace(
                    prefix=tuple(site.testbed.prefix(name)),
                    address=site.testbed.address(name),
                )
                for name in NODES
            },
            address=site.testbed.controller_address,
            module="experiments.islands.worker",
            standby_after_s=_STANDBY_S,
        )
        cluster = load_cluster(self._file)
        driver_config = DriverConfig(
            context=TrialContext(site.config, site.dataset),
            checking=StepChecking(SpikeRule(factor=2.0, window=64), {}),
            loss_scaling=LossScaling(1.0, 1, lambda cluster, plan: plan),
            standby_plans=StandbyPlans(
                lambda cluster, current: _after(scenario, cluster),
                lambda clusters, current: _Foreseen(scenario, clusters),
                _SOON_S if scenario.is_foreseen else 0.0,
            ),
            membership=Membership(cluster, self._file),
            transport="sockets",
            seed=0,
            storage=storage,
            host={},
            recovery=recovery,
            reroutes=reroutes,
        )
        self.driver = Driver(
            Controller(scenario.before, launcher.connections, cluster.nodes),
            launcher,
            driver_config,
            cluster=cluster,
            validation_weights=(),
        )
        self.driver.begin()

    def prepare(self) -> float:
        """Take steps, save to the cloud, take one more step; return its seconds."""
        for step in range(_SAVED):
            self.driver.step(step)
        begin_s = time.perf_counter()
        self.driver.save(_SAVED)
        self.driver.wait_saved()
        self._wait_uploaded(_SAVED)
        time.sleep(max(0.0, begin_s + _FORESEEN_S - time.perf_counter()))
        begin_s = time.perf_counter()
        self.driver.step(_SAVED)
        return time.perf_counter() - begin_s

    def strike(self) -> dict[str, Any]:
        """Apply the scenario's change in the middle of the next step; return times."""
        heard: list[tuple[float, Any]] = []
        self.driver.on_recovery = lambda found: heard.append(
            (time.perf_counter(), found)
        )
        struck: list[float] = []
        timer = threading.Timer(_INTO_STEP_S, lambda: struck.append(self._strike()))
        timer.start()
        ended = [self._stepped()]
        while not any(isinstance(found, Recovered) for _, found in heard):
            ended.append(self._stepped())
        at_s, recovered = heard[-1]
        phases_s = dict(recovered.seconds)
        begun_s, from_s = at_s - sum(phases_s.values()), struck[0]
        found: dict[str, Any] = {}
        if len(heard) > 1:  # the others continued first
            found["rerouted"] = _detour(heard[0], struck[0], ended)
            from_s = begun_s  # all stand still from here on
        return found | {
            "total_s": ended[-1] - from_s,
            "detect_s": begun_s - from_s,
            **{f"{phase}_s": seconds for phase, seconds in phases_s.items()},
            "first_step_s": ended[-1] - at_s,
            "lost_steps": max(0, recovered.from_step - recovered.step),
            "bytes": dict(recovered.num_bytes),
            "tier_s": dict(recovered.tier_s),
            "later_step_s": self._stepped() - ended[-1],
        }

    def _stepped(self) -> float:
        """Take the next step; return when it was done."""
        try:
            self.driver.step(self.driver.at)
        except RolledBack as back:
            self.driver.step(back.step)
        return time.perf_counter()

    def _strike(self) -> float:
        scenario = self._scenario
        if scenario.wiped:
            rmtree(self._storage.at(str(scenario.killed)), ignore_errors=True)
        pid = scenario.killed and workers(self._folder)[scenario.killed]
        at_s = time.perf_counter()
        if set(scenario.there) != scenario.before.nodes:
            self._join(scenario.there)
        if pid:
            os.kill(int(pid), signal.SIGKILL)
        return at_s

    def _join(self, names: Sequence[str]) -> None:
        """Make these the nodes of the cluster file."""
        part = self._file.with_suffix(".part")
        part.write_text(cluster_toml(cluster_of(names)))
        part.replace(self._file)

    def _wait_uploaded(self, step: int) -> None:
        assert self._store is not None
        end_s = time.monotonic() + _UPLOAD_S
        while step not in committed_steps(self._store):
            assert time.monotonic() < end_s, "the upload takes too long"
            time.sleep(0.5)


def _detour(
    told: tuple[float, Rerouted], struck_s: float, ended: Sequence[float]
) -> dict[str, Any]:
    """Return when the others redid the step, the rerouting's time, and their steps."""
    at_s, rerouted = told
    return {
        "next_step_done_s": next(end for end in ended if end > at_s) - struck_s,
        "reroute_s": sum(rerouted.seconds.values()),
        "steps": sum(at_s < end for end in ended[:-1]),
    }
