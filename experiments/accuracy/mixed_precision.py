# SPDX-License-Identifier: Apache-2.0
"""Compares training in unlike precisions with float32: losses of `tiny` on A100 + V100.

    python -m experiments.accuracy.mixed_precision [--steps 300] [--global-batch 48]
        [--learning-rates 1e-3 3e-3] [--seeds 0 1] [--plans mixed float32]
        [--output FILE]

Prints one JSON object. For every peak learning rate (by default the preset's) and seed,
runs of the preset on simulated devices see the same text in the same order. `mixed` is
a pipeline over an A100 in bfloat16 and a V100 in float16, each one's best precision.
`bfloat16_first` is the same plan with the V100 in float32. `float32` is the same plan
in float32. `float32_other` is two replicas in float32, which add the same gradients in
another order. `float32_nudged` is the plan in float32 at a learning rate greater by
2**-9, one rounding of bfloat16: it shows how far any difference of that size grows by
the last step. For each run the output has the mean training loss of the last 50 steps,
the validation loss after the last, and the number of skipped steps; then the distance
of each run from `float32`. The distance of `float32_other` is the unavoidable effect of
rounding in float32. `most_apart` is the maximum over seeds. Runs that are already in
the output file are not repeated.
"""

import argparse
import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.models.presets import model_preset
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.plans.plan_files import write_plan
from hetjax.plans.precision import with_node_precisions, with_precisions
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.rundir import METRICS
from hetjax.training.session import run
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.presets import preset

COMMAND = "python -m experiments.accuracy.mixed_precision"
TINY = preset("tiny")
CLUSTER = Cluster(
    name="mixed",
    nodes=(
        Node(name="a100", device="A100-SXM4-80GB", count=1),
        Node(name="v100", device="V100-SXM2-32GB", count=1),
    ),
)
NUDGED = "float32_nudged"
NUDGE = 1 + 2.0**-9
NUM_LAST = 50  # steps whose losses are averaged
MICROBATCH = 8
LOSSES = ("loss", "validation_loss")


def plans(global_batch: int) -> dict[str, Plan]:
    """Return the plans by the names of their runs."""
    count = global_batch // MICROBATCH
    pipeline = Plan(
        model="tiny",
        seq_len=TINY.config.seq_len,
        global_batch=global_batch,
        replicas=(
            Replica(
                num_microbatches=count,
                microbatch_size=MICROBATCH,
                stages=(_stage("a100", (0, 3), 2), _stage("v100", (3, 6), 1)),
            ),
        ),
    )
    replicas = tuple(
        Replica(
            num_microbatches=count // 2,
            microbatch_size=MICROBATCH,
            stages=(_stage(node.name, (0, 6), 1),),
        )
        for node in CLUSTER.nodes
    )
    return {
        "mixed": with_precisions(pipeline, CLUSTER, "best"),
        "bfloat16_first": with_node_precisions(
            pipeline, {"a100": "bfloat16", "v100": "float32"}
        ),
        "float32": pipeline,
        NUDGED: pipeline,
        "float32_other": replace(pipeline, replicas=replicas),
    }


def _stage(node: str, layers: tuple[int, int], launch_ahead: int) -> Stage:
    return Stage(node=node, devices=(0,), layers=layers, launch_ahead=launch_ahead)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What the compared runs have in common."""

    steps: int
    global_batch: int
    learning_rate: float
    seed: int


def _nudged(training: Training, name: str) -> Training:
    nudge = NUDGE if name == NUDGED else 1.0
    return replace(training, learning_rate=training.learning_rate * nudge)


def trained(training: Training, plan: Plan) -> dict[str, Any]:
    """Return the results of a run of `tiny` by this plan."""
    with TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        config = _config(training, plan, Path(folder))
        run(config, TINY, model_preset("tiny"))
        lines = read_journal(config.run_dir / METRICS)
    losses = [line["loss"] for line in lines if "loss" in line]
    scales = [line["loss_scale"] for line in lines if "loss_scale" in line]
    found = {
        "precisions": [stage.precision or "float32" for _, _, stage in plan.stages()],
        "loss": fmean(losses[-NUM_LAST:]),
        "validation_loss": lines[-1]["val_loss"],
        "num_skipped": sum("skipped" in line for line in lines),
    }
    return found | ({"last_scale": scales[-1]} if scales else {})


def _config(training: Training, plan: Plan, folder: Path) -> RunConfig:
    cluster, file = folder / "mixed.toml", folder / "plan.json"
    cluster.write_text(cluster_toml(CLUSTER))
    write_plan(file, plan)
    optimizer = replace(TINY.config.optimizer, learning_rate=training.learning_rate)
    return replace(
        TINY.config,
        run_dir=folder / "run",
        steps=training.steps,
        seed=training.seed,
        global_batch=training.global_batch,
        cluster=cluster,
        plan=file,
        optimizer=optimizer,
        evaluation=replace(TINY.config.evaluation, every=0, sample_tokens=0),
        checkpoint=replace(TINY.config.checkpoint, every=0),
    )


def main(words: list[str] | None = None) -> None:
    """Run all requested trainings and print their results."""
    options = _parser().parse_args(words)
    output: Path | None = options.output
    command = " ".join([COMMAND, *(sys.argv[1:] if words is None else words)])
    found = _read(output)
    chosen = plans(options.global_batch)
    chosen = {name: chosen[name] for name in options.plans}
    for rate, seed in product(options.learning_rates, options.seeds):
        training = Training(
            steps=options.steps,
            global_batch=options.global_batch,
            learning_rate=rate,
            seed=seed,
        )
        runs = found.setdefault(training, {})
        for name, plan in chosen.items():
            if name not in runs:
                runs[name] = trained(_nudged(training, name), plan)
            if output is not None:
                output.write_text(_told(command, found))
    print(_told(command, found))


def _parser() -> argparse.ArgumentParser:
    config = TINY.config
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--global-batch", type=int, default=config.global_batch)
    rates = {"type": float, "default": [config.optimizer.learning_rate]}
    parser.add_argument("--learning-rates", nargs="+", **rates)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    names = list(plans(config.global_batch))
    parser.add_argument("--plans", nargs="+", choices=names, default=names)
    parser.add_argument("--output", type=Path)
    return parser


_Runs = dict[str, dict[str, Any]]  # results of each run, by name


def _read(output: Path | None) -> dict[Training, _Runs]:
    """Return the results that the output file already has."""
    if output is None or not output.exists():
        return {}
    sizes = [field.name for field in fields(Training)]
    return {
        Training(**{name: of_one[name] for name in sizes}): of_one["runs"]
        for of_one in json.loads(output.read_text())["trainings"]
    }


def _told(command: str, found: dict[Training, _Runs]) -> str:
    trainings = [
        asdict(training) | {"runs": runs, "apart": _apart(runs)}
        for training, runs in found.items()
    ]
    result = {"command": command, "trainings": trainings}
    return json.dumps(result | {"most_apart": _most(found)}, indent=2) + "\n"


def _apart(runs: _Runs) -> dict[str, dict[str, float]]:
    """Return how far each run's losses are above those of the float32 run."""
    if "float32" not in runs:
        return {}
    return {
        name: {loss: own[loss] - runs["float32"][loss] for loss in LOSSES}
        for name, own in runs.items()
        if name != "float32"
    }


def _most(found: dict[Training, _Runs]) -> list[dict[str, Any]]:
    """Return the maximum distance from float32 over seeds, by learning rate."""
    of_rate: dict[float, list[dict[str, dict[str, float]]]] = {}
    for training, runs in found.items():
        of_rate.setdefault(training.learning_rate, []).append(_apart(runs))
    return [
        {"learning_rate": rate}
        | {
            name: {
                loss: max(abs(apart[name][loss]) for apart in seeds if name in apart)
                for loss in LOSSES
            }
            for name in seeds[0]
        }
        for rate, seeds in of_rate.items()
    ]


if __name__ == "__main__":
    main()
