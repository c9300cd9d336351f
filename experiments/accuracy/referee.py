# SPDX-License-Identifier: Apache-2.0
"""The measured runs as plans, and what a Megatron-DeepSpeed run of them costs.

Owns the reading of the measured rows and everything that is peculiar to the system
that they were measured on: blocking messages, sums after the backward, the five
fitted constants. Does not own the layer times (`hetjax/costs/`), the clock
(`hetjax/schedule/simulator.py`), what lives at once (`hetjax/schedule/memory.py`) nor
the fitting (`folds.py`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import log2
from pathlib import Path
from typing import Any

from hetjax.costs.costs import (
    Costs,
    Reduction,
    StageKey,
    StageMemory,
    StageTimes,
)
from hetjax.costs.profile import Profile
from hetjax.costs.profiled import profiled_times
from hetjax.costs.sailor import LayerBytes, sailor_layers, sailor_profile
from hetjax.plans.launch_ahead import default_launch_ahead
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh
from hetjax.schedule.action import Program
from hetjax.schedule.lower import lower
from hetjax.schedule.memory import peak_memory_bytes
from hetjax.schedule.simulator import simulate

MODEL, DEVICE, SEQ_LEN, TENSOR = "OPT-350", "GH-96", 2048, 4
# fp32 weight, gradient and Adam's two moments, per fp32 weight
_COPIES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """What is fitted; the defaults are what it would be if nothing were.

    `timing_s`: what timing a layer's pass on its own adds to its measured seconds
    (starting on an idle device and waiting for its end, which a run does not do).
    `message_share`, `sync_share`: share of the measured link rate that pipeline
    messages and gradient sums reach.
    `framework_bytes`: CUDA context, NCCL buffers and the like on every device.
    `saved_factor`: bytes that the allocator holds per byte of saved activations.
    """

    timing_s: float = 0.0
    message_share: float = 1.0
    sync_share: float = 1.0
    framework_bytes: float = 0.0
    saved_factor: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GroundTruth:
    """The published inputs: layer times, layer bytes, and the link's fitted rate."""

    profile: Profile
    layers: tuple[LayerBytes, ...]
    link: tuple[float, float, float]
    link_bytes_per_s: float  # the fit's maximum: one device to one device

    def message_s(self, size_bytes: float) -> float:
        """Seconds of a message of one device to one device of another node.

        The fit is a parabola in log2 of the size in 1e6 bytes, in 1e9 bytes/s.
        """
        x = log2(size_bytes / 1e6)
        square, slope, base = self.link
        rate = (square * x * x + slope * x + base) * 1e9
        assert rate > 0, "a message too small for the fit"
        return size_bytes / min(rate, self.link_bytes_per_s)


@dataclass(frozen=True)
class Run:
    """One measured run: its plan, and what was measured."""

    name: str
    plan: Plan
    measured_s: float
    measured_sync_s: float
    measured_bytes: int

    @property
    def replica(self) -> Replica:
        return self.plan.replicas[0]

    @property
    def group(self) -> tuple[int, int]:
        """Pipeline depth and microbatch size."""
        return len(self.replica.stages), self.replica.microbatch_size

    @cached_property
    def programs(self) -> Mapping[str, Program]:
        return lower(self.plan)


def read_ground_truth(folder: Path) -> GroundTruth:
    """Read the OPT-350M / GH200 profile, layer bytes and link fit."""
    fits = json.loads((folder / "network/sailor_inter_node_fits.json").read_text())
    link, link_bytes_per_s = fits["inter"][DEVICE]["1"]
    return GroundTruth(
        profile=sailor_profile(
            folder / f"sailor/profiles_referee/{MODEL}/{DEVICE}.json",
            model=MODEL,
            device=DEVICE,
            seq_len=SEQ_LEN,
        ),
        layers=sailor_layers(
            folder / "sailor/layer_memory.json", model=MODEL, tensor=TENSOR
        ),
        link=tuple(link),
        link_bytes_per_s=link_bytes_per_s,
    )


def read_runs(folder: Path) -> list[Run]:
    """Read the measured runs, in the order of the file."""
    rows = json.loads((folder / "sailor/measured_opt350_gh200.json").read_text())
    return [
        Run(
            name=Path(row["upstream_file"]).stem.removeprefix("plan_config_"),
            plan=_plan(row),
            measured_s=row["measured_iteration_s"],
            measured_sync_s=row["measured_grad_sync_s"],
            measured_bytes=row["measured_peak_bytes"],
        )
        for row in rows
    ]


def _plan(row: Mapping[str, Any]) -> Plan:
    """The row's layout as a 1F1B plan: one node of four devices per stage."""
    depth = row["pp"]
    cuts = list(pairwise(accumulate(row["layers_per_stage"], initial=0)))
    replicas = [
        Replica(
            num_microbatches=row["num_microbatches"],
            microbatch_size=row["microbatch"],
            stages=tuple(
                Stage(
                    node=f"gh200-{r * depth + s}",
                    devices=tuple(range(TENSOR)),
                    mesh=StageMesh(tensor=TENSOR),
                    layers=layers,
                    launch_ahead=default_launch_ahead(
                        "1f1b",
                        num_stages=depth,
                        stage=s,
                        num_microbatches=row["num_microbatches"],
                    ),
                )
                for s, layers in enumerate(cuts)
            ),
        )
        for r in range(row["dp"])
    ]
    return Plan(
        model=MODEL,
        seq_len=SEQ_LEN,
        global_batch=row["global_batch"],
        replicas=tuple(replicas),
    )


def predicted_s(run: Run, truth: GroundTruth, constants: Constants) -> float:
    """Return the seconds of one iteration, by the simulator."""
    costs = run_costs(run, truth, constants)
    return simulate(run.programs, run.plan, costs).step_time_s


def predicted_bytes(run: Run, truth: GroundTruth, constants: Constants) -> float:
    """Return the peak bytes of the fullest device, by the memory model."""
    costs = Costs(times={}, memory=_memory(run, truth, constants))
    return max(peak_memory_bytes(run.programs, run.plan, costs).values())


def ring_s(run: Run, truth: GroundTruth) -> float:
    """Return the seconds of the largest stage's gradient sum at the full link rate."""
    size = max(_params_bytes(stage, truth) for stage in run.replica.stages)
    return _hop_bytes(size, len(run.plan.replicas)) / truth.link_bytes_per_s


def run_costs(run: Run, truth: GroundTruth, constants: Constants) -> Costs:
    """Return what the run's actions cost on the system that was measured.

    Its stages wait while they send and receive, so a message is time of both stages,
    not of a link. Each of the four ranks of a node sums its gradients over its own
    network port, at the rate of one.
    """
    profile = _as_run(truth.profile, constants.timing_s)
    rate = constants.sync_share * truth.link_bytes_per_s
    holders: dict[tuple[int, int], list[Stage]] = {}
    for _, _, stage in run.plan.stages():
        holders.setdefault(stage.layers, []).append(stage)
    return Costs(
        times=_times(run, profile, truth, constants),
        trunks={stage.node: rate for _, _, stage in run.plan.stages()},
        reductions={
            layers: Reduction(
                trunk_bytes=dict.fromkeys(
                    (stage.node for stage in stages),
                    _hop_bytes(_params_bytes(stages[0], truth), len(stages)),
                )
            )
            for layers, stages in holders.items()
            if len(stages) > 1
        },
        memory=_memory(run, truth, constants),
    )


def _memory(
    run: Run, truth: GroundTruth, constants: Constants
) -> dict[StageKey, StageMemory]:
    """What the stages hold, of the published bytes of their layers.

    The last stage's program has forward and backward: what it saves is workspace.
    """
    replica, found = run.replica, []
    for s, stage in enumerate(replica.stages):
        first, last = stage.layers[0] == 0, s == len(replica.stages) - 1
        size, held = replica.microbatch_size, truth.layers[slice(*stage.layers)]
        saved = size * sum(layer.saved_bytes for layer in held)
        saved_bytes = round(constants.saved_factor * saved)
        before = truth.layers[stage.layers[0] - 1]
        weights_bytes = _COPIES * _params_bytes(stage, truth)
        found.append(
            StageMemory(
                static_bytes=round(weights_bytes + constants.framework_bytes),
                saved_bytes=saved_bytes,
                input_bytes=0 if first else size * before.output_bytes,
                output_bytes=0 if last else size * held[-1].output_bytes,
                workspace_bytes=saved_bytes if last else 0,
            )
        )
    return {(r, s): found[s] for r, s, _ in run.plan.stages()}


def _times(
    run: Run, profile: Profile, truth: GroundTruth, constants: Constants
) -> dict[StageKey, StageTimes]:
    replica, depth = run.replica, len(run.replica.stages)
    size = replica.microbatch_size * truth.layers[0].output_bytes
    message_s = truth.message_s(size) / constants.message_share
    by_stage = [
        _with_messages(
            profiled_times(
                profile,
                stage,
                device=DEVICE,
                microbatch_size=replica.microbatch_size,
            ),
            num_neighbours=(s > 0) + (s < depth - 1),
            message_s=message_s,
        )
        for s, stage in enumerate(replica.stages)
    ]
    return {(r, s): by_stage[s] for r, s, _ in run.plan.stages()}


def _with_messages(
    times: StageTimes, *, num_neighbours: int, message_s: float
) -> StageTimes:
    """Add the messages on each side of a pass; each neighbour means one per pass."""
    waiting_s = num_neighbours * message_s
    return replace(
        times,
        forward_s=times.forward_s + waiting_s,
        backward_s=times.backward_s + waiting_s,
        fused_s=times.fused_s + 2 * waiting_s,
    )


def _as_run(profile: Profile, timing_s: float) -> Profile:
    """Return the profile with the cost of timing each pass taken off."""
    return replace(
        profile,
        measurements=tuple(
            replace(
                m,
                forward_s=max(0.0, m.forward_s - timing_s),
                backward_s=max(0.0, m.backward_s - timing_s),
                update_s=max(0.0, m.update_s - timing_s),
            )
            for m in profile.measurements
        ),
    )


def _params_bytes(stage: Stage, truth: GroundTruth) -> int:
    return sum(layer.params_bytes for layer in truth.layers[slice(*stage.layers)])


def _hop_bytes(size_bytes: float, num_holders: int) -> float:
    """Bytes over each hop of a ring sum."""
    return 2 * (num_holders - 1) / num_holders * size_bytes
