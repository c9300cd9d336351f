# SPDX-License-Identifier: Apache-2.0
"""Training in unlike precisions against float32: the losses of `tiny` on A100 + V100.

    python -m experiments.accuracy.mixed_precision [--steps 300] [--global-batch 48]

Prints one JSON object. Three runs of the preset on simulated devices see the same text
in the same order: `mixed`, a pipeline over an A100 in bfloat16 and a V100 in float16,
what each does best; `float32`, the same plan in float32; `float32_other`, two replicas
in float32, which add the same gradients in another order. Of each it tells the mean
training loss of the last 50 steps, the validation loss after the last, and the steps
that were skipped; then how far `mixed` is from `float32`, and beside it how far the two
float32 plans are from each other, which is what rounding does to training anyway. With
16 sequences a step the preset's learning rate is too high to tell: 0.3 % more of it
moves the loss after 120 steps of the same float32 plan by 0.1.
"""

import argparse
import json
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.models.presets import model_preset
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.plans.plan_files import write_plan
from hetjax.plans.precision import with_precisions
from hetjax.training.presets import preset
from hetjax.training.run import run
from hetjax.training.rundir import METRICS, read_journal

COMMAND = "python -m experiments.accuracy.mixed_precision"
TINY = preset("tiny")
CLUSTER = Cluster(
    name="mixed",
    nodes=(
        Node(name="a100", device="A100-SXM4-80GB", count=1),
        Node(name="v100", device="V100-SXM2-32GB", count=1),
    ),
)
NUM_LAST = 50  # steps whose losses are averaged
MICROBATCH = 8


def plans(global_batch: int) -> dict[str, Plan]:
    """The three plans, by the names of their runs."""
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
        "float32": pipeline,
        "float32_other": replace(pipeline, replicas=replicas),
    }


def _stage(node: str, layers: tuple[int, int], launch_ahead: int) -> Stage:
    return Stage(node=node, devices=(0,), layers=layers, launch_ahead=launch_ahead)


def trained(name: str, plan: Plan, steps: int, folder: Path) -> dict[str, Any]:
    """What becomes of a run of `tiny` by this plan."""
    cluster, file = folder / "mixed.toml", folder / f"{name}.json"
    cluster.write_text(cluster_toml(CLUSTER))
    write_plan(file, plan)
    config = replace(
        TINY.config,
        run_dir=folder / name,
        steps=steps,
        global_batch=plan.global_batch,
        cluster=cluster,
        plan=file,
        evaluation=replace(TINY.config.evaluation, every=0, sample_tokens=0),
        checkpoint=replace(TINY.config.checkpoint, every=0),
    )
    with redirect_stdout(sys.stderr):
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


def main(words: list[str] | None = None) -> None:
    """Run all three and print what they came to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--global-batch", type=int, default=TINY.config.global_batch)
    options = parser.parse_args(words)
    with TemporaryDirectory() as folder:
        found = {
            name: trained(name, plan, options.steps, Path(folder))
            for name, plan in plans(options.global_batch).items()
        }
    sizes = {"command": COMMAND, **vars(options)}
    print(json.dumps(sizes | {"runs": found} | _apart(found), indent=2))


def _apart(found: dict[str, Any]) -> dict[str, Any]:
    """How far runs are from the one in float32, by loss."""
    return {
        f"{name}_from_float32": {
            loss: abs(found[name][loss] - found["float32"][loss])
            for loss in ("loss", "validation_loss")
        }
        for name in ("mixed", "float32_other")
    }


if __name__ == "__main__":
    main()
