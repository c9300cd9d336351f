# SPDX-License-Identifier: Apache-2.0
"""Predicted against measured step time: profile, simulate, run, all on this machine.

    python -m experiments.accuracy.measured_step [--rounds 15] [--blocks 8]

Prints one JSON object with `predicted_s`, `measured_s` and `error` (relative) of two
plans of a small Llama on four nodes of one CPU device: one replica of four stages under
1F1B, and two replicas of two stages with unlike cuts.

The prediction follows a user's path: `measure_profile` of `hetjax.profile` writes a
profile file, `costs_of` of `hetjax.simulate` prices the plan with it, and the simulator
runs the plan's programs. This path has one change (`in_turn`). Simulated devices share
the machine's cores, so a run in which they work side by side would measure the sharing.
Here they work one after the other: asynchronous dispatch is off, each action starts
only after the previous action's result is ready, and no program spans two devices.
(Otherwise a program whose inputs are still on their way would run beside others.) The
simulator gets the same setting: all stages are on one device, which is one lane, and
all messages pass one trunk, of the median bandwidth of the measured links. The step is
then the sum of all programs, whatever their order; this number does not show bubbles
and overlap.

Because the machine's speed drifts, a round measures real steps between two profiles and
averages the two predictions. Its measured time is the median of the steps, as layer
times are medians of repetitions. `error` is the median over rounds of
predicted / measured - 1. A cache on disk keeps compiled programs from one profile to
the next.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import jax

from experiments.benchmarks.one_jit import random_batch
from hetjax.api.profiling import measure_model
from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.costs.costs import Costs, Route
from hetjax.costs.measured.layer_profile import Profile, read_profile
from hetjax.costs.plan_costs import costs_of
from hetjax.mesh.process_setup import simulate_devices
from hetjax.models.decoders import LlamaConfig, llama_model
from hetjax.models.model import Model
from hetjax.optimizers.optimizer import optimizer
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.plans.schedules import default_launch_ahead
from hetjax.profiling.config import ProfileConfig
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.schedule.programs.action import Action
from hetjax.schedule.programs.lower import lower
from hetjax.schedule.simulation.simulator import simulate
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.presets import Preset

NODES = ("cpu-0", "cpu-1", "cpu-2", "cpu-3")
CLUSTER = Cluster(
    name="here", nodes=tuple(Node(name=n, device="cpu", count=1) for n in NODES)
)
TRUNK = "copy"
WARM_UP = 1  # rounds
NUM_STEPS = 3  # of a round


def small_llama(blocks: int) -> Model:
    return llama_model(
        LlamaConfig(
            name="measured-step",
            vocab_size=1_024,
            hidden_size=256,
            inner_size=704,
            num_blocks=blocks,
            num_heads=8,
            num_kv_heads=8,
            max_seq_len=256,
        )
    )


def preset_of(model: Model, microbatches: int) -> Preset:
    return Preset(
        summary="predicted against measured",
        config=RunConfig(
            model=model.name,
            run_dir=Path("never"),
            steps=1_000,
            seq_len=model.max_seq_len,
            global_batch=microbatches,
            dtype="float32",
        ),
    )


def plans(model: Model, microbatches: int) -> dict[str, Plan]:
    """Return plans of four stages and of two replicas of two stages.

    No run of blocks is shorter than two.
    """
    last, half = len(model.layers), microbatches // 2
    quarters = [0, *(1 + (last - 2) * i // 4 for i in (1, 2, 3)), last]
    one = [_replica(quarters, microbatches, NODES)]
    two = [
        _replica([0, last // 2 - 1, last], half, NODES[:2]),
        _replica([0, last // 2 + 1, last], microbatches - half, NODES[2:]),
    ]
    return {"four_stages": _plan(model, one), "two_replicas": _plan(model, two)}


def _plan(model: Model, replicas: list[Replica]) -> Plan:
    return Plan(
        model=model.name,
        seq_len=model.max_seq_len,
        global_batch=sum(r.num_microbatches for r in replicas),
        replicas=tuple(replicas),
    )


def _replica(cuts: Sequence[int], microbatches: int, nodes: Sequence[str]) -> Replica:
    num_stages = len(cuts) - 1
    stages = tuple(
        Stage(
            node=nodes[s],
            devices=(0,),
            layers=(cuts[s], cuts[s + 1]),
            launch_ahead=default_launch_ahead(
                "1f1b", num_stages=num_stages, stage=s, num_microbatches=microbatches
            ),
        )
        for s in range(num_stages)
    )
    return Replica(num_microbatches=microbatches, microbatch_size=1, stages=stages)


def predict(plan: Plan, model: Model, profile: Profile, preset: Preset) -> float:
    """Return the seconds of a step whose devices work one at a time."""
    rule = optimizer(preset.config.optimizer, preset.config.steps)
    costs = costs_of(
        plan,
        model,
        CLUSTER,
        profile,
        dtype=preset.config.dtype,
        optimizer=rule.init,
        transport="in-process",
    )
    plan, costs = in_turn(plan, costs)
    return simulate(lower(plan, {}), plan, costs).step_time_s


def in_turn(plan: Plan, costs: Costs) -> tuple[Plan, Costs]:
    """Put all stages on one device and all messages through one trunk."""
    names = {trunk for route in costs.routes.values() for trunk in route.trunks}
    rate = median(costs.trunks[name] for name in names)
    one_device = tuple(
        replace(
            replica,
            stages=tuple(
                replace(stage, node=NODES[0], devices=(0,)) for stage in replica.stages
            ),
        )
        for replica in plan.replicas
    )
    reductions = {
        group: replace(found, trunk_bytes={TRUNK: sum(found.trunk_bytes.values())})
        for group, found in costs.reductions.items()
    }
    routes = {edge: _through_one_trunk(route) for edge, route in costs.routes.items()}
    return replace(plan, replicas=one_device), replace(
        costs, trunks={TRUNK: rate}, routes=routes, reductions=reductions
    )


def _through_one_trunk(route: Route) -> Route:
    return Route(trunks=(TRUNK,), latency_s=route.latency_s)


class _InTurn:
    """An observer that lets no action start before the previous one has ended."""

    def enqueued(self, action: Action, start_s: float, end_s: float, made: Any) -> None:
        jax.block_until_ready(made)


class Run:
    """A plan that the runtime executes for real."""

    def __init__(self, plan: Plan, model: Model, preset: Preset) -> None:
        nodes = {n: [d] for n, d in zip(NODES, jax.devices(), strict=True)}
        rule = optimizer(preset.config.optimizer, preset.config.steps)
        clip_norm = preset.config.optimizer.clip_norm
        self.runtime = StageRuntime(plan, model, nodes, rule, clip_norm=clip_norm)
        self.runtime.initialise(0)
        self.batch = random_batch(plan, model.vocab_size)

    def step(self) -> float:
        """Run one step; return its seconds."""
        start_s = time.perf_counter()
        self.runtime.step(0, self.batch, _InTurn())
        jax.block_until_ready([s.params for s in self.runtime.stages.values()])
        return time.perf_counter() - start_s


def profiled(model: Model, preset: Preset, folder: Path) -> Profile:
    """Write a profile as `python -m hetjax.profile` does, and read it."""
    cluster, output = folder / "cluster.toml", folder / "profile.json"
    cluster.write_text(cluster_toml(CLUSTER))
    output.unlink(missing_ok=True)  # an existing profile would not be measured again
    config = ProfileConfig(
        cluster=cluster,
        seq_len=model.max_seq_len,
        microbatch_sizes=(1,),
        tensor=(1,),
        remat=("none",),
        dtype="float32",
        output=output,
    )
    with redirect_stdout(sys.stderr):
        measure_model(config, preset, model)
    return read_profile(output)


def compare(
    plan: Plan, model: Model, preset: Preset, rounds: int, folder: Path
) -> dict[str, Any]:
    """Alternate predicting and running for `rounds` rounds, and compare."""
    run, pairs = Run(plan, model, preset), []

    def predicted() -> float:
        return predict(plan, model, profiled(model, preset, folder), preset)

    before_s = predicted()
    for _ in range(rounds + WARM_UP):
        measured_s = median(run.step() for _ in range(NUM_STEPS))
        after_s = predicted()
        pairs.append(((before_s + after_s) / 2, measured_s))
        before_s = after_s
    pairs = pairs[WARM_UP:]
    return {
        "predicted_s": median(p for p, _ in pairs),
        "measured_s": median(m for _, m in pairs),
        "error": median(p / m - 1 for p, m in pairs),
        "errors_of_rounds": sorted(round(p / m - 1, 4) for p, m in pairs),
        "rounds": [{"predicted_s": p, "measured_s": m} for p, m in pairs],
    }


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = small_llama(arguments.blocks)
    preset = preset_of(model, arguments.microbatches)
    return {
        "plans": {
            name: compare(plan, model, preset, arguments.rounds, folder)
            for name, plan in plans(model, arguments.microbatches).items()
        },
        "rounds": arguments.rounds,
        "microbatches": arguments.microbatches,
        "blocks": arguments.blocks,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "jax": jax.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    arguments = parser.parse_args()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    simulate_devices(len(NODES))
    with TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", f"{folder}/compiled")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        print(json.dumps(measure(arguments, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
