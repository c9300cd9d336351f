# SPDX-License-Identifier: Apache-2.0
"""Compares training with 8-bit optimizer moments with float32: the losses of `tiny`.

    python -m experiments.accuracy.state_bits [--steps 200] [--seeds 0 1]
        [--rules adamw adamw_slow lion] [--output FILE]

Prints one JSON object. For every rule and seed, runs of the preset see the same text in
the same order. `float32` and `codes` run on one simulated device, with moments in 32
and in 8 bits. `codes_replicas` runs in 8 bits on the preset's plan, three unlike
replicas on five devices, which adds the same gradients in another order. `nudged` runs
in 32 bits at a learning rate greater by 2**-9: it shows how far a difference of that
size grows by the last step. The rules are AdamW as in the preset, `adamw_slow` with a
beta2 of 0.999, and Lion at a tenth of the rate. For each run the output has the mean
training loss of the last 50 steps and the validation loss after the last, then their
distances from `float32`. `most_apart` is the maximum over seeds. Runs that are already
in the output file are not repeated.

Owns the cases and the comparison. Does not own the codes (`hetjax/stage/`).
"""

import argparse
import json
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from hetjax.models.presets import model_preset
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.plans.plan_files import write_plan
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.rundir import METRICS
from hetjax.training.session import run
from hetjax.training.settings.config import OptimizerConfig, RunConfig
from hetjax.training.settings.presets import preset

COMMAND = "python -m experiments.accuracy.state_bits"
TINY = preset("tiny")
ADAMW = TINY.config.optimizer
RULES = {
    "adamw": ADAMW,
    "adamw_slow": replace(ADAMW, beta2=0.999),
    "lion": replace(ADAMW, name="lion", learning_rate=ADAMW.learning_rate / 10),
}
NUDGE = 1 + 2.0**-9
NUM_LAST = 50  # steps whose losses are averaged
LOSSES = ("loss", "validation_loss")
ONE_DEVICE = Plan(
    model="tiny",
    seq_len=TINY.config.seq_len,
    global_batch=TINY.config.global_batch,
    replicas=(
        Replica(
            num_microbatches=TINY.config.global_batch // 8,
            microbatch_size=8,
            stages=(Stage(node="a100-0", devices=(0,), layers=(0, 6), launch_ahead=1),),
        ),
    ),
)

_Runs = dict[str, dict[str, float]]  # results of each run, by name


def cases(rule: OptimizerConfig) -> dict[str, tuple[OptimizerConfig, Plan | None]]:
    """Return the runs of a rule; a run without a plan uses the preset's."""
    codes = replace(rule, state_bits=8)
    nudged = replace(rule, learning_rate=rule.learning_rate * NUDGE)
    return {
        "float32": (rule, ONE_DEVICE),
        "codes": (codes, ONE_DEVICE),
        "codes_replicas": (codes, None),
        "nudged": (nudged, ONE_DEVICE),
    }


def trained(
    steps: int, seed: int, rule: OptimizerConfig, plan: Plan | None
) -> dict[str, float]:
    """Return the losses of a run of `tiny`."""
    with TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        config = _config(Path(folder), steps, seed, rule, plan)
        run(config, TINY, model_preset("tiny"))
        lines = read_journal(config.run_dir / METRICS)
    losses = [line["loss"] for line in lines if "loss" in line]
    last = fmean(losses[-NUM_LAST:])
    return {"loss": last, "validation_loss": lines[-1]["val_loss"]}


def _config(
    folder: Path, steps: int, seed: int, rule: OptimizerConfig, plan: Plan | None
) -> RunConfig:
    file = folder / "plan.json"
    if plan is not None:
        write_plan(file, plan)
    return replace(
        TINY.config,
        run_dir=folder / "run",
        steps=steps,
        seed=seed,
        plan=file if plan is not None else None,
        optimizer=rule,
        evaluation=replace(TINY.config.evaluation, every=0, sample_tokens=0),
        checkpoint=replace(TINY.config.checkpoint, every=0),
    )


def main(words: list[str] | None = None) -> None:
    """Run all requested cases and print their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(words)
    output: Path | None = options.output
    asked = ["--rules", *options.rules, "--seeds", *map(str, options.seeds)]
    command = " ".join([COMMAND, "--steps", str(options.steps), *asked])
    there = output is not None and output.exists()
    found = json.loads(output.read_text())["runs"] if output and there else {}
    for seed, rule in product(options.seeds, options.rules):
        for name, (optimizer, plan) in cases(RULES[rule]).items():
            runs = found.setdefault(rule, {}).setdefault(str(seed), {})
            if name not in runs:
                runs[name] = trained(options.steps, seed, optimizer, plan)
            if output is not None:
                output.write_text(_told(command, options.steps, found))
    print(_told(command, options.steps, found))


def _told(command: str, steps: int, found: dict[str, dict[str, _Runs]]) -> str:
    most = {rule: _most_apart(list(seeds.values())) for rule, seeds in found.items()}
    result = {"command": command, "steps": steps, "most_apart": most, "runs": found}
    return json.dumps(result, indent=2) + "\n"


def _most_apart(seeds: list[_Runs]) -> dict[str, dict[str, float]]:
    """Return the maximum distance from float32 over seeds, by run name and loss."""
    names = [name for name in seeds[0] if name != "float32"]
    return {
        name: {
            loss: max(
                abs(runs[name][loss] - runs["float32"][loss])
                for runs in seeds
                if name in runs
            )
            for loss in LOSSES
        }
        for name in names
    }


if __name__ == "__main__":
    main()
