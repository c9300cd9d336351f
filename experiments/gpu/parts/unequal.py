# SPDX-License-Identifier: Apache-2.0
"""Divides one card into two unequal ones; tests whether the planner's layout is best.

Two processes share the card as clients of MPS: one gets 70 % of its multiprocessors and
one 30 %, each with the same share of its memory. Both are profiled at the same time.
Then the planner's plan, an even split and the larger share alone train in turn, each on
its own workers. On CPUs there is no MPS: there the smaller share runs slower programs.
Owns the layouts and their comparison. Does not own the shares
(`experiments/gpu/divided/shares.py`), the service that makes them
(`experiments/gpu/divided/mps.py`) nor the model (`experiments/islands/models.py`).
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import jax

from experiments.gpu.divided.mps import NoService, multi_process_service
from experiments.gpu.divided.multiprocessors import NoContext, multiprocessors
from experiments.gpu.divided.shares import (
    LARGER,
    SMALLER,
    Share,
    as_kinds,
    cluster_of_shares,
    kind_of,
    memory_gib_of,
    profiled,
    shares_of_card,
    shares_of_cpu,
)
from experiments.gpu.models.words import in_words
from experiments.gpu.processes.compiling import noted, quickly
from experiments.gpu.rows import Row
from experiments.gpu.setting import OutOfTime, Setting, Skipped
from experiments.islands import models
from hetjax.cluster.catalogue import Precision, best_precision, device_spec
from hetjax.cluster.cluster import Cluster
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.cluster.discovery import device_name
from hetjax.cluster.local_devices import LocalDevice
from hetjax.costs.measured.layer_profile import Profile, measured
from hetjax.data.dataset import Dataset
from hetjax.launchers.device_probe import accelerators_here
from hetjax.launchers.launcher import start_workers
from hetjax.launchers.local_processes import OnThisMachine
from hetjax.models.presets import model_preset
from hetjax.optimizers.optimizer import optimizer
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.search.find import find_plan
from hetjax.plans.plan import Plan
from hetjax.runtime.control.controller import Controller
from hetjax.schedule.predicted import Predicted
from hetjax.training.settings.config import RunConfig
from hetjax.training.worker import worker_settings

PLANNED, EVEN, ALONE = "the planner's layout", "an even split", "the larger share alone"
_WORKER = "experiments.islands.worker"
_CPU_GIB = 4.0  # of memory, the catalogue's figure for a CPU
_PROFILE_S = 300.0  # at most
_KEPT_S = 2.0  # for the last rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What is trained: a model of `experiments/islands/models.py`, and how much."""

    model: str
    global_batch: int
    microbatch_sizes: tuple[int, ...]
    steps: int
    local_work: float


_USUAL = Sizes(
    model="gpt-12x768",
    global_batch=128,
    microbatch_sizes=(16,),
    steps=10,
    local_work=5_000,
)
_QUICK = Sizes(
    model="gpt-2x64", global_batch=4, microbatch_sizes=(1,), steps=3, local_work=1_000
)


def measure(setting: Setting) -> Iterator[Row]:
    card = None if setting.platform == "cpu" else _card()
    jax.config.update("jax_platforms", "cpu")  # only the shares use the card
    sizes = setting.choose(_USUAL, _QUICK)
    with setting.scratch() as folder, _shares(card) as shares:
        gib = _CPU_GIB if card is None else memory_gib_of(card)
        kind = "cpu" if card is None else device_name(card)
        cluster = cluster_of_shares(shares, kind, gib, folder)
        job = Job(setting, folder, shares, cluster, sizes)
        if card is not None:
            yield from _multiprocessors(shares)
        profile = job.profile()
        yield _unlike(profile, sizes, job.note)
        yield from _compared(job, profile)


def _card() -> LocalDevice:
    """Return the first GPU that a process of this user may use; Skipped if none."""
    cards = [d for d in accelerators_here(os.environ) if d.platform == "cuda"]
    if not cards:
        raise Skipped("no GPU of NVIDIA is here, and only those have MPS")
    if not cards[0].memory_bytes:
        raise Skipped("the driver does not say how much memory the card has")
    return cards[0]


@contextmanager
def _shares(card: LocalDevice | None) -> Iterator[Sequence[Share]]:
    """Yield two shares of the card, or of the CPU, within the block."""
    if card is None:
        yield shares_of_cpu()
        return
    with ExitStack() as service:
        try:
            clients = service.enter_context(multi_process_service(card.handle))
        except NoService as reason:
            raise Skipped(f"MPS does not start: {reason}") from None
        yield shares_of_card({**clients, **quickly("cuda")})


def _multiprocessors(shares: Sequence[Share]) -> Iterator[Row]:
    """Test whether the service divides the card; Skipped if nothing runs on a share."""
    whole = multiprocessors(os.environ)
    for share in shares:
        try:
            found = multiprocessors(share.variables)
        except NoContext as reason:
            raise Skipped(f"MPS has started, but not for clients: {reason}") from None
        yield Row(
            what=f"multiprocessors of the {share.name} share",
            measured=found,
            predicted=share.fraction * whole,
            note=f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE asks for {share.fraction:.0%} of "
            f"{whole}",
        )


def _unlike(profile: Profile, sizes: Sizes, note: str) -> Row:
    """Report how unequal the shares are for the model that is trained."""
    block_s = {}
    for name in (LARGER, SMALLER):
        found = measured(
            profile,
            device=kind_of(name),
            kind=profile.layers[1],
            tensor=1,
            microbatch_size=max(sizes.microbatch_sizes),
        )
        block_s[name] = found.forward_s + found.backward_s
    return Row(
        what="time of a block on the smaller share over that on the larger",
        measured=block_s[SMALLER] / block_s[LARGER],
        note=f"{sizes.model}, {1e3 * block_s[LARGER]:.3g} ms on the larger; "
        f"both measured at the same time{note}",
    )


@dataclass(frozen=True, slots=True)
class Job:
    """What all layouts have in common.

    `cluster` has the shares as they are, two devices of one kind.
    """

    setting: Setting
    folder: Path
    shares: Sequence[Share]
    cluster: Cluster
    sizes: Sizes

    @property
    def precision(self) -> Precision:
        """The precision of both shares; not float16, which would need a loss scale."""
        best = best_precision(device_spec(self.cluster.nodes[0]))
        return best if best == "bfloat16" else "float32"

    @property
    def is_cpu(self) -> bool:
        return self.setting.platform == "cpu"

    @property
    def logs(self) -> Path:
        return self.setting.logs_of("unequal", self.folder)

    @property
    def note(self) -> str:
        """A note on how its programs are compiled, if not in the usual way."""
        return noted(self.setting.platform)

    def profile(self) -> Profile:
        sizes = ",".join(map(str, self.sizes.microbatch_sizes))
        options = ["--microbatch-sizes", sizes, "--dtype", self.precision]
        options += ["--platform", "cpu"] if self.is_cpu else []
        limit_s = min(self.setting.left_s() - _KEPT_S, _PROFILE_S)
        return profiled(
            self.shares,
            self.cluster,
            self.sizes.model,
            self.folder,
            self.logs,
            options,
            limit_s,
        )

    def config(self) -> RunConfig:
        preset = models.preset(self.sizes.model).config
        cache = replace(preset.data, cache_dir=self.folder / "cache")
        return replace(
            preset,
            simulate=False,
            platform="cpu" if self.is_cpu else "auto",
            dtype=self.precision,
            global_batch=self.sizes.global_batch,
            data=cache,
        )

    def request(self, profile: Profile) -> PlanRequest:
        """Return the request for a plan of the shares as devices of two kinds."""
        config = self.config()
        return PlanRequest(
            model=model_preset(self.sizes.model),
            cluster=as_kinds(self.cluster, self.shares),
            seq_len=config.seq_len,
            global_batch=config.global_batch,
            dtype=self.precision,
            optimizer=optimizer(config.optimizer, config.steps).init,
            profile=profile,
            microbatch_sizes=self.sizes.microbatch_sizes,
            tensor_degrees=(1,),
            data_degrees=(1,),
            remats=("none",),
        )

    def as_run(self, plan: Plan) -> Plan:
        """Return the plan with the attention of the shares' real devices."""
        replicas = tuple(
            replace(r, stages=tuple(replace(s, attention=None) for s in r.stages))
            for r in plan.replicas
        )
        config = self.config()
        request = PlanRequest(
            model=model_preset(self.sizes.model),
            cluster=self.cluster,
            seq_len=config.seq_len,
            global_batch=config.global_batch,
            dtype=self.precision,
        )
        return request.said(replace(plan, replicas=replicas))


def _compared(job: Job, profile: Profile) -> Iterator[Row]:
    """Yield each layout's step beside its prediction, then the planner's gain."""
    layouts = predicted_layouts(job.request(profile), job.sizes)
    model = model_preset(job.sizes.model)
    dataset = models.own_sources(job.folder, model.vocab_size)
    step_s: dict[str, float] = {}
    with _running(layouts, job, dataset) as controllers:
        for name, controller in controllers.items():
            if job.setting.left_s() < _KEPT_S:
                raise OutOfTime(f"{name} had no time to train")
            step_s[name] = _step_s(controller, job.sizes.steps)
            yield Row(
                what=f"step of {name}",
                measured=step_s[name],
                unit="s",
                predicted=layouts[name].simulation.step_time_s,
                note=f"{in_words(layouts[name].plan)}{job.note}",
            )
    yield gain(step_s, {n: p.simulation.step_time_s for n, p in layouts.items()})


def predicted_layouts(request: PlanRequest, sizes: Sizes) -> Mapping[str, Predicted]:
    """Return the layouts to compare, all for the same batch."""
    cluster, size = request.cluster, max(sizes.microbatch_sizes)
    replica = models.pipeline(
        request.model, (LARGER, SMALLER), sizes.global_batch // size, size
    )
    larger = replace(cluster, nodes=(cluster.node(LARGER),), links=())
    return {
        PLANNED: find_plan(request, local_work=sizes.local_work).best,
        EVEN: evaluate_plan(request, models.plan_of(request.model, replica)),
        ALONE: find_plan(
            replace(request, cluster=larger), local_work=sizes.local_work
        ).best,
    }


@contextmanager
def _running(
    layouts: Mapping[str, Predicted], job: Job, dataset: Dataset
) -> Iterator[Mapping[str, Controller]]:
    """Yield the controllers of all layouts, ready to train. The layouts start at the
    same time in a full session, one by one in a quick one."""
    with ExitStack() as ends:
        stacks = {name: ends.enter_context(ExitStack()) for name in layouts}

        def start(name: str) -> Controller:
            plan = job.as_run(layouts[name].plan)
            return _started(plan, job, dataset, name, stacks[name])

        with ThreadPoolExecutor(job.setting.choose(len(layouts), 1)) as pool:
            controllers = dict(zip(layouts, pool.map(start, layouts), strict=True))
        yield controllers
        for controller in controllers.values():
            controller.end()


def _started(
    plan: Plan, job: Job, dataset: Dataset, name: str, stack: ExitStack
) -> Controller:
    """Start a worker on each share that the plan uses, in the share's environment."""
    launcher = OnThisMachine(
        job.logs / name.replace(" ", "-"),
        stack,
        module=_WORKER,
        cluster=job.cluster,
        environments=lambda _: {s.name: s.environment for s in job.shares},
    )
    controller = start_workers(launcher, plan)
    settings = worker_settings(job.config(), cluster_toml(job.cluster), plan, dataset)
    controller.build(settings)
    controller.connect()
    controller.compile()
    controller.initialise(0)
    return controller


def _step_s(controller: Controller, steps: int) -> float:
    """Return a step's seconds: the median of the later two thirds."""
    times_s = []
    for step in range(steps):
        begin_s = time.perf_counter()
        controller.step(step)
        times_s.append(time.perf_counter() - begin_s)
    return median(times_s[steps // 3 :])


def gain(step_s: Mapping[str, float], predicted_s: Mapping[str, float]) -> Row:
    """Return the speed of the planner's layout relative to the better of the others."""
    return Row(
        what="gain of the planner's layout over the better of the other two",
        measured=min(step_s[EVEN], step_s[ALONE]) / step_s[PLANNED],
        unit="times",
        predicted=min(predicted_s[EVEN], predicted_s[ALONE]) / predicted_s[PLANNED],
    )
