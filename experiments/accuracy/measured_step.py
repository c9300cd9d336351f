# SPDX-License-Identifier: Apache-2.0
"""Predicted against measured step time: profile, simulate, run, all on this machine.

    python -m experiments.accuracy.measured_step [--rounds 15] [--blocks 8]

Prints one JSON object with `predicted_s`, `measured_s` and `error` (relative) of two
plans of a small Llama: one replica of four stages under 1F1B, and two replicas of two
stages with unlike cuts.

Simulated devices share the machine's cores, so that a run in which they work side by
side would measure the sharing. Here they work one after the other: asynchronous
dispatch is off, a program ends before the next one starts, and no program spans two
devices. The simulator is told so: the plan that it gets has all stages on one device,
which is one lane. The step is then the sum of all programs, whatever their order;
bubbles and overlap are not shown by this number.

Predicted are the times of layers (alone in a program of one kind, two blocks in a
scan) added up by the simulator with messages and gradient sums at the measured rate of
copies between devices. The layers are timed before and after every real step, since
the machine drifts; `error` is the median over rounds of predicted / measured - 1. The
update is timed as the plan has it: where several replicas hold a layer it takes up to
four times as long on a CPU (see hetjax/runtime/update.py), which profiles do not hold.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import jax
import optax

from experiments.benchmarks.one_jit import random_batch
from hetjax.costs.costs import Costs, Group, Reduction, Route, StageKey
from hetjax.costs.profile import Profile
from hetjax.costs.profiled import profiled_times
from hetjax.mesh.simulated import simulate_devices
from hetjax.models.counts import parameter_bytes
from hetjax.models.llama import LlamaConfig, llama_model
from hetjax.models.model import Model
from hetjax.plans.launch_ahead import default_launch_ahead
from hetjax.plans.plan import LayerRange, Plan, Replica, Stage, segments, segments_of
from hetjax.runtime.embedded import Embedded
from hetjax.runtime.measure import (
    Case,
    LayerBench,
    layer_kinds,
    measure_link,
    program_seconds,
)
from hetjax.schedule.lower import lower
from hetjax.schedule.simulator import simulate

NODE, DEVICE, TRUNK = "here", "cpu", "copy"
HIDDEN_SIZE = 256
WARM_UP = 2  # rounds


def small_llama(blocks: int) -> Model:
    return llama_model(
        LlamaConfig(
            name="measured-step",
            vocab_size=1_024,
            hidden_size=HIDDEN_SIZE,
            inner_size=704,
            num_blocks=blocks,
            num_heads=8,
            num_kv_heads=8,
            max_seq_len=256,
        )
    )


def plans(model: Model, microbatches: int) -> dict[str, Plan]:
    """Four stages; two replicas of two. No run of blocks is shorter than two."""
    last, half = len(model.layers), microbatches // 2
    quarters = [0, *(1 + (last - 2) * i // 4 for i in (1, 2, 3)), last]
    one = [_replica(quarters, microbatches, first_device=0)]
    two = [
        _replica([0, last // 2 - 1, last], half, first_device=0),
        _replica([0, last // 2 + 1, last], microbatches - half, first_device=2),
    ]
    return {"four_stages": _plan(model, one), "two_replicas": _plan(model, two)}


def _plan(model: Model, replicas: list[Replica]) -> Plan:
    return Plan(
        model=model.name,
        seq_len=model.max_seq_len,
        global_batch=sum(r.num_microbatches for r in replicas),
        replicas=tuple(replicas),
    )


def _replica(cuts: Sequence[int], microbatches: int, first_device: int) -> Replica:
    num_stages = len(cuts) - 1
    stages = tuple(
        Stage(
            node=NODE,
            devices=(first_device + s,),
            layers=(cuts[s], cuts[s + 1]),
            launch_ahead=default_launch_ahead(
                "1f1b", num_stages=num_stages, stage=s, num_microbatches=microbatches
            ),
        )
        for s in range(num_stages)
    )
    return Replica(num_microbatches=microbatches, microbatch_size=1, stages=stages)


def predict(plan: Plan, model: Model, profile: Profile) -> float:
    """Seconds of a step whose stages share one device."""
    plan = replace(plan, replicas=tuple(map(_on_one_device, plan.replicas)))
    message_bytes = plan.seq_len * HIDDEN_SIZE * 4
    keys = [(r, s) for r, s, _ in plan.stages()]
    edges = [
        (a, b) for a in keys for b in keys if a[0] == b[0] and abs(a[1] - b[1]) == 1
    ]
    (link,) = profile.links
    route = Route(trunks=(TRUNK,), latency_s=link.latency_ms / 1e3)
    costs = Costs(
        times={
            (r, s): profiled_times(profile, stage, device=DEVICE, microbatch_size=1)
            for r, s, stage in plan.stages()
        },
        trunks={TRUNK: link.bandwidth_gbit_per_s * 1e9 / 8},
        routes=dict.fromkeys(edges, route),
        message_bytes=dict.fromkeys(edges, float(message_bytes)),
        reductions=_reductions(plan, model, route),
    )
    return simulate(lower(plan, {}), plan, costs).step_time_s


def _on_one_device(replica: Replica) -> Replica:
    stages = tuple(replace(stage, devices=(0,)) for stage in replica.stages)
    return replace(replica, stages=stages)


def _reductions(plan: Plan, model: Model, route: Route) -> dict[Group, Reduction]:
    holders: dict[LayerRange, list[StageKey]] = {}
    for r, s, stage in plan.stages():
        for segment in segments_of(stage, segments(plan)):
            holders.setdefault(segment, []).append((r, s))
    return {
        (lo, hi): Reduction(
            hops=(route,) * len(keys),
            hop_bytes=2
            * (len(keys) - 1)
            / len(keys)
            * sum(parameter_bytes(layer, 4) for layer in model.layers[lo:hi]),
        )
        for (lo, hi), keys in holders.items()
        if len(keys) > 1
    }


class Run:
    """A plan that runs for real."""

    def __init__(self, plan: Plan, model: Model) -> None:
        nodes = {NODE: jax.devices()}
        self.runtime = Embedded(plan, model, nodes, optax.adamw(1e-3), clip_norm=1.0)
        self.runtime.initialise(0)
        self.batch = random_batch(plan, model.vocab_size)

    def step(self) -> float:
        """Run one step; return its seconds."""
        start_s = time.perf_counter()
        self.runtime.step(0, self.batch)
        jax.block_until_ready([s.params for s in self.runtime.stages.values()])
        return time.perf_counter() - start_s


class Profiler:
    """Times the layers as a plan of so many replicas has them."""

    def __init__(self, model: Model, num_replicas: int) -> None:
        self.model, self.kinds = model, layer_kinds(model)
        self.benches = [
            LayerBench(
                Case(device=DEVICE, kind=kind, microbatch_size=1),
                model,
                jax.devices(),
                optax.adamw(1e-3),
                seq_len=model.max_seq_len,
                dtype="float32",
                num_replicas=num_replicas,
            )
            for kind in dict.fromkeys(self.kinds)
        ]

    def profile(self, repeats: int) -> Profile:
        """Time everything now. Means: a step is a sum, and noise has a long tail."""
        times = [[b.time_once() for b in self.benches] for _ in range(repeats)]
        program_s = program_seconds(jax.devices()[0])
        means = [
            {name: fmean(times[name] for times in of) for name in of[0]}
            for of in zip(*times, strict=True)
        ]
        return Profile(
            model=self.model.name,
            seq_len=self.model.max_seq_len,
            dtype="float32",
            layers=self.kinds,
            measurements=tuple(
                bench.measurement([mean], program_s)
                for bench, mean in zip(self.benches, means, strict=True)
            ),
            links=(measure_link(jax.devices()[0], jax.devices()[1], (NODE, NODE)),),
            program_s=program_s,
        )


def compare(plan: Plan, model: Model, rounds: int, repeats: int) -> dict[str, Any]:
    """Rounds of predicting and running, in turns."""
    profiler, run = Profiler(model, len(plan.replicas)), Run(plan, model)
    pairs = []
    for _ in range(rounds + WARM_UP):
        before_s = predict(plan, model, profiler.profile(repeats))
        measured_s = run.step()
        after_s = predict(plan, model, profiler.profile(repeats))
        pairs.append(((before_s + after_s) / 2, measured_s))
    pairs = pairs[WARM_UP:]
    return {
        "predicted_s": median(p for p, _ in pairs),
        "measured_s": median(m for _, m in pairs),
        "error": median(p / m - 1 for p, m in pairs),
        "errors_of_rounds": sorted(round(p / m - 1, 4) for p, m in pairs),
        "measured_min_max": [f(m for _, m in pairs) for f in (min, max)],
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    model = small_llama(arguments.blocks)
    return {
        "plans": {
            name: compare(plan, model, arguments.rounds, arguments.repeats)
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
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    arguments = parser.parse_args()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    simulate_devices(4)
    print(json.dumps(measure(arguments), indent=1))


if __name__ == "__main__":
    main()
