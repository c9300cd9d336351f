# SPDX-License-Identifier: Apache-2.0
"""Turns the measured runs into plans, and predicts them as the product does.

Owns the reading of the measured rows and the path of a user's prediction: the nodes as
a cluster, Sailor's layer times as a profile or the catalogue alone, `costs_of`, the
programs, the simulator and the memory model. Everything set here, users can set: the
network's rate and the form of attention. Does not own the folds (`folds.py`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.measured.layer_profile import Profile
from hetjax.costs.measured.sailor import sailor_profile
from hetjax.costs.plan_costs import costs_of
from hetjax.models.decoders import GPTConfig, gpt_model
from hetjax.models.model import Model
from hetjax.plans.attention import Attention
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh
from hetjax.plans.schedules import default_launch_ahead
from hetjax.schedule.programs.lower import lower
from hetjax.schedule.simulation.memory import memory_uses
from hetjax.schedule.simulation.simulator import simulate
from hetjax.stage.partition import tied_holders

MODEL, GPU, SEQ_LEN, TENSOR = "OPT-350", "GH-96", 2048, 4
DEVICE = "GH200-480GB"  # the catalogue's name of Sailor's GH-96
DTYPE = "float32"
DIMS = ("vocab_size", "hidden_size", "num_layers", "heads", "sequence_length")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroundTruth:
    """The inputs of a prediction: the model, and measured layer times if any."""

    model: Model
    profile: Profile | None = None


@dataclass(frozen=True)
class Run:
    """One measured run: its plan, and its measured seconds and bytes."""

    name: str
    plan: Plan
    measured_s: float
    measured_bytes: int

    @property
    def replica(self) -> Replica:
        return self.plan.replicas[0]

    @property
    def group(self) -> tuple[int, int]:
        """Pipeline depth and microbatch size."""
        return len(self.replica.stages), self.replica.microbatch_size


def read_ground_truth(folder: Path) -> GroundTruth:
    """Read the profile of OPT-350M on GH200, and the model as hetjax knows it."""
    profile = sailor_profile(
        folder / f"sailor/profiles_referee/{MODEL}/{GPU}.json",
        model=MODEL,
        device=DEVICE,
        seq_len=SEQ_LEN,
        dtype=DTYPE,
    )
    return GroundTruth(model=model_of_size(model_dims(folder)), profile=profile)


def model_dims(folder: Path) -> dict[str, int]:
    """Return the published dimensions of OPT-350M."""
    published = json.loads((folder / "sailor/models.json").read_text())[MODEL]
    return {name: published[name] for name in DIMS}


def model_of_size(dims: Mapping[str, int]) -> Model:
    """Return the model of these dimensions as hetjax knows it."""
    config = GPTConfig(
        name=MODEL,
        vocab_size=dims["vocab_size"],
        hidden_size=dims["hidden_size"],
        num_blocks=dims["num_layers"],
        num_heads=dims["heads"],
        max_seq_len=dims["sequence_length"],
    )
    return gpt_model(config)


def read_runs(folder: Path) -> list[Run]:
    """Read the measured runs, in the order of the file."""
    rows = json.loads((folder / "sailor/measured_opt350_gh200.json").read_text())
    return [
        Run(
            name=Path(row["upstream_file"]).stem.removeprefix("plan_config_"),
            plan=plan_of_row(row),
            measured_s=row["measured_iteration_s"],
            measured_bytes=row["measured_peak_bytes"],
        )
        for row in rows
    ]


def predicted(
    run: Run,
    truth: GroundTruth,
    network_gbit_per_s: float | None = None,
    attention: Attention | None = None,
) -> tuple[float, int]:
    """Return the seconds of one iteration and the peak bytes of the fullest device.

    `network_gbit_per_s` is the cluster file's rate for every node; None takes the
    device catalogue's. `attention` is the form that a user asks for.
    """
    names = dict.fromkeys(stage.node for _, _, stage in run.plan.stages())
    node = Node(
        name="", device=DEVICE, count=TENSOR, network_gbit_per_s=network_gbit_per_s
    )
    nodes = tuple(replace(node, name=name) for name in names)
    cluster = Cluster(name="measured", nodes=nodes)
    costs = costs_of(
        run.plan,
        truth.model,
        cluster,
        truth.profile,
        dtype=DTYPE,
        attention=attention,
    )
    programs = lower(run.plan, tied_holders(run.plan, truth.model))
    step_time_s = simulate(programs, run.plan, costs).step_time_s
    uses = memory_uses(programs, run.plan, costs).values()
    return step_time_s, max(use.total_bytes for use in uses)


def plan_of_row(row: Mapping[str, Any]) -> Plan:
    """Return the row's layout as a 1F1B plan: one node of four devices per stage."""
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
