# SPDX-License-Identifier: Apache-2.0
"""Translates options of other programs, and former options of hetjax.

The other programs are transformers, torchtitan, axolotl and nanoGPT. Owns the names
that mean the same here and are accepted, and what to type in place of the others. Does
not own hetjax's options (`training/settings/config.py`, commands).
"""

from collections.abc import Collection, Iterator, Sequence

from hetjax.errors import BadInput
from hetjax.training.settings.values import FORMER_NAMES, warn_of_former_name

# Same meaning, same values.
_SAME = {
    "optimizer.learning-rate": "lr learning-rate peak-lr max-lr optimizer.lr",
    "optimizer.name": "optimizer optim",
    "optimizer.weight-decay": "weight-decay",
    "optimizer.warmup-steps": "warmup-steps lr-scheduler.warmup-steps",
    "optimizer.beta1": "adam-beta1 beta1",
    "optimizer.beta2": "adam-beta2 beta2",
    "optimizer.clip-norm": "max-grad-norm grad-clip clip-norm training.max-norm",
    "steps": "max-steps max-iters num-steps train-steps training.steps",
    "global-batch": "global-batch-size training.global-batch-size",
    "seq-len": "seq-length sequence-length sequence-len max-seq-length max-seq-len "
    "max-length block-size model-max-length context-length training.seq-len",
    "run-dir": "output-dir out-dir save-dir job.dump-folder dump-folder",
    "seed": "training.seed debug.seed",
    "data.path": "data data-path train-file train-data training.dataset-path",
    "data.validation": "validation-file val-data eval-data eval-file",
    "data.tokenizer": "tokenizer tokenizer-path",
    "data.cache-dir": "cache-dir",
    "checkpoint.every": "save-steps save-every checkpoint.interval",
    "evaluation.every": "eval-steps eval-every eval-interval",
    "lora.rank": "lora-r lora-rank",
    "lora.alpha": "lora-alpha",
    "train.label-smoothing": "label-smoothing label-smoothing-factor",
    "train.z-loss": "z-loss",
    "platform": "device",
    "output": "out",
    "batch-size": "eval-batch-size per-device-eval-batch-size",
}
# Flags of other programs: an option here, and its value for `true` or nothing
_FLAGS = {
    "bf16": ("--dtype", "bfloat16"),
    "fp16": ("--dtype", "float16"),
    "fp32": ("--dtype", "float32"),
    "cpu": ("--platform", "cpu"),
    "use-cpu": ("--platform", "cpu"),
    "no-cuda": ("--platform", "cpu"),
    "packing": ("--data.pack", "True"),
    "sample-packing": ("--data.pack", "True"),
}
# What to type for `false`, if a flag is not off by default
_NOT_OFF = {"bf16": ("bfloat16 is the default of most devices", "--dtype float32")}
_BATCH = (
    "the batch is all sequences of a step, over devices and microbatches",
    "--global-batch N",
)
_EPOCHS = (
    "a run's length is in steps; an epoch is tokens / (seq-len x global-batch)",
    "--steps N",
)
_LAYOUT = (
    "the planner chooses how to split the model over the devices",
    "leave it out, or give --plan FILE",
)
_DEVICES = (
    "a run uses the devices here, or those of a cluster file",
    "leave it out, or give --cluster FILE",
)
_STEPS = "every step is a line of metrics.jsonl in the run directory"
_TRACKED = f"{_STEPS}; observers of train get it, too"
_WANDB = _TRACKED, "--observer wandb"
_TENSORBOARD = _TRACKED, "--observer tensorboard"
_RESUMES = "the same command resumes from the last checkpoint", "leave it out"
_MODEL = (
    "the model comes first, without an option",
    "hetjax train FOLDER, with its config.json and weights",
)
_EVERY = (
    "checkpoints and evaluations come every N steps",
    "--checkpoint.every N --evaluation.every N",
)
_COMPILED = (
    "every program is compiled, and attention uses its device's kernel",
    "leave it out",
)
_RATE = "a schedule has a shape, and a final learning rate as a fraction of its peak"
_SCHEDULE = _RATE, "--optimizer.schedule cosine --optimizer.final-fraction 0"
_REMAT = "the planner chooses for each stage what to recompute", "leave it out"
_TEXT = "text is read from files", "--data.path FILE"
_FROZEN = (
    "adapters are trained over frozen weights in fewer bits",
    "--lora.rank 16 --lora.frozen nf4",
)
# Names with another meaning here: why, and what to type.
_UNLIKE = {
    "batch-size": _BATCH,
    "train-batch-size": _BATCH,
    "micro-batch-size": _BATCH,
    "per-device-train-batch-size": _BATCH,
    "training.local-batch-size": _BATCH,
    "gradient-accumulation-steps": _BATCH,
    "epochs": _EPOCHS,
    "num-epochs": _EPOCHS,
    "num-train-epochs": _EPOCHS,
    "warmup-ratio": ("warm-up is counted in steps", "--optimizer.warmup-steps N"),
    "lr-scheduler-type": _SCHEDULE,
    "lr-scheduler": _SCHEDULE,
    "lr-scheduler.decay-type": _SCHEDULE,
    "min-lr": _SCHEDULE,
    "model-name-or-path": _MODEL,
    "model-name": _MODEL,
    "base-model": _MODEL,
    "model.name": _MODEL,
    "model.flavor": _MODEL,
    "dataset": _TEXT,
    "datasets": _TEXT,
    "dataset-name": _TEXT,
    "training.dataset": _TEXT,
    "val-set-size": (
        "validation uses a file, otherwise a held-out part of the text",
        "--data.validation FILE",
    ),
    "save-strategy": _EVERY,
    "eval-strategy": _EVERY,
    "evaluation-strategy": _EVERY,
    "save-total-limit": (
        "a run keeps its newest checkpoints, and the best",
        "--checkpoint.keep N",
    ),
    "wandb": _WANDB,
    "wandb-project": (_TRACKED, "--observer wandb, and set WANDB_PROJECT"),
    "use-wandb": _WANDB,
    "report-to": _WANDB,
    "tensorboard": _TENSORBOARD,
    "metrics.enable-wandb": _WANDB,
    "metrics.enable-tensorboard": _TENSORBOARD,
    "logging-steps": (_STEPS, "leave it out"),
    "metrics.log-freq": (_STEPS, "leave it out"),
    "logging-dir": _TENSORBOARD,
    "resume": _RESUMES,
    "resume-from-checkpoint": _RESUMES,
    "overwrite-output-dir": ("a new run has a new directory", "--run-dir FOLDER"),
    "checkpoint.folder": ("checkpoints are in the run directory", "--run-dir FOLDER"),
    "load-in-4bit": _FROZEN,
    "load-in-8bit": _FROZEN,
    "qlora": _FROZEN,
    "adapter": ("a rank turns adapters on", "--lora.rank 16"),
    "lora-dropout": ("adapters have no dropout", "leave it out"),
    "lora-target-modules": ("targets are a regular expression", "--lora.targets REGEX"),
    "gradient-checkpointing": _REMAT,
    "activation-checkpoint.mode": _REMAT,
    "deepspeed": _LAYOUT,
    "fsdp": _LAYOUT,
    "tensor-parallel-size": _LAYOUT,
    "pipeline-parallel-size": _LAYOUT,
    "parallelism.tensor-parallel-degree": _LAYOUT,
    "parallelism.pipeline-parallel-degree": _LAYOUT,
    "parallelism.data-parallel-shard-degree": _LAYOUT,
    "parallelism.data-parallel-replicate-degree": _LAYOUT,
    "parallelism.context-parallel-degree": _LAYOUT,
    "gpus": _DEVICES,
    "devices": _DEVICES,
    "num-gpus": _DEVICES,
    "num-nodes": _DEVICES,
    "num-processes": _DEVICES,
    "nproc-per-node": _DEVICES,
    "compile": _COMPILED,
    "torch-compile": _COMPILED,
    "compile.enable": _COMPILED,
    "flash-attention": _COMPILED,
    "attn-implementation": ("attention uses its device's kernel", "--attention best"),
    "torch-dtype": ("precisions have full names", "--dtype bfloat16"),
    "dry-run": ("another command plans, and predicts a step", "hetjax plan"),
    "push-to-hub": ("weights are written by another command", "hetjax export"),
    "config": ("settings are options, and presets are sets of them", "leave it out"),
}
_OURS = {theirs: ours for ours, names in _SAME.items() for theirs in names.split()}
_FORMER = {
    former.replace("_", "-"): name.replace("_", "-")
    for former, name in FORMER_NAMES.items()
}
YES, NO = ("true", "1", "yes"), ("false", "0", "no")


def in_our_words(arguments: Sequence[str], options: Collection[str]) -> list[str]:
    """Return the arguments with hetjax's names in place of other programs' names.

    `options` are the command's own, as --name; these are never translated. Raises
    BadInput for a name that has another meaning here, with what to type.
    """
    return [*_in_our_words(list(arguments), options)]


def _in_our_words(rest: list[str], options: Collection[str]) -> Iterator[str]:
    while rest:
        argument = rest.pop(0)
        typed, equals, value = argument.partition("=")
        name = typed.replace("_", "-").removeprefix("--")
        if not typed.startswith("--") or f"--{name}" in options:
            yield argument
        elif (now := f"--{_FORMER.get(name)}") in options:
            warn_of_former_name(f"--{name}", now)
            yield f"{now}{equals}{value}"
        elif (ours := f"--{_OURS.get(name)}") in options:
            yield f"{ours}{equals}{value}"
        elif name in _FLAGS and _FLAGS[name][0] in options:
            if not equals and rest and rest[0].lower() in (*YES, *NO):
                value = rest.pop(0)
            option, on = _FLAGS[name]
            if value.lower() in ("", *YES):
                yield from (option, on)
            elif value.lower() in NO and on == "True":
                yield from (option, "False")
            else:
                why, fix = _NOT_OFF.get(name, ("it is off by default", ""))
                raise _unlike(f"{typed} {value}", why, fix)
        elif name in _UNLIKE and "--global-batch" in options:  # `train` or `plan`
            raise _unlike(typed, *_UNLIKE[name])
        else:
            yield argument


def _unlike(typed: str, why: str, fix: str) -> BadInput:
    return BadInput(
        got=f"{typed}, an option of other programs",
        allowed=f"in hetjax, {why}",
        fix=fix or "leave it out",
    )
