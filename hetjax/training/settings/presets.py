# SPDX-License-Identifier: Apache-2.0
"""Defines complete settings for named runs.

Owns what `python -m hetjax.train PRESET` starts from, and what `profile` measures of it
by default. Does not own the sizes of models (`hetjax/models/presets.py`).
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetjax.cluster.cluster_files import preset_path
from hetjax.data.hugging_face import TOKENIZER
from hetjax.data.settings import DataConfig
from hetjax.errors import BadInput, did_you_mean
from hetjax.models.hugging_face.stored_tensors import has_weights
from hetjax.models.named import TypedName, is_function, is_path, named_config, portable
from hetjax.models.presets import MODEL_CONFIGS, PUBLISHED
from hetjax.plans.plan import Remat
from hetjax.plans.plan_files import read_plan
from hetjax.profiling.config import ProfileConfig
from hetjax.training.settings.config import (
    CheckpointConfig,
    EvaluationConfig,
    OptimizerConfig,
    RunConfig,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Settings to start from, and the cluster and plan that go with them, if any."""

    summary: str
    config: RunConfig
    cluster: Path | None = None
    plan: Path | None = None


def preset(name: str) -> Preset:
    """Return the preset of that name, which a user typed.

    A file, a folder or a function that gives a model has a preset of its own. Raises
    BadInput with the nearest names if there is no such preset.
    """
    if (Path(name) / "plan.json").is_file():
        raise BadInput(
            got=f"{name!r}, the directory of a run",
            allowed="a preset, or the folder of a model",
            fix="resume the run with the command that began it; or train what it "
            f"learnt: hetjax export {name} --to exported, hetjax train exported",
        )
    if name not in PRESETS and (is_path(name) or is_function(name)):
        return _own(TypedName(portable(name)))
    if name not in PRESETS:
        raise BadInput(
            got=f"preset {name!r}",
            allowed="tiny or another preset that hetjax train --help lists, or a "
            "Hugging Face model folder",
            fix=did_you_mean(name.lower(), list(PRESETS), most=3),
        )
    return PRESETS[name]


def check_plan_or_preset(given: str) -> None:
    """Raise BadInput for what is neither an existing file nor a preset."""
    # Path.exists raises for a name that is too long
    if given not in PRESETS and not os.path.exists(given):
        shown = given if len(given) < 80 else f"{given[:77]}..."
        raise BadInput(
            got=f"{shown!r}, which is neither a file nor a preset",
            allowed="a plan file, or a preset that hetjax train --help lists",
            fix=did_you_mean(given, list(PRESETS), most=3),
        )


_TINY = Preset(
    summary="1M Llama on 5 simulated devices, unlike replicas; minutes on a CPU",
    config=RunConfig(
        model="tiny",
        run_dir=Path("runs/tiny"),
        steps=160,
        seq_len=64,
        global_batch=48,
        dtype="float32",
        simulate=True,
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=60),
        evaluation=EvaluationConfig(every=100, num_batches=4, prompt="Return the"),
        checkpoint=CheckpointConfig(every=100),
    ),
    cluster=preset_path("tiny"),
    plan=Path(__file__).parent / "plans" / "tiny.json",
)


def _on_gpus(
    model: str, summary: str, rate: float, warmup_steps: int = 2_000, **settings: Any
) -> Preset:
    """Return a preset for whatever GPUs there are; `rate` is the peak learning rate."""
    usual: dict[str, Any] = {"steps": 100_000, "global_batch": 1_024}
    config = RunConfig(
        model=model,
        run_dir=Path(f"runs/{model}"),
        optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=warmup_steps),
        **usual | settings,
    )
    return Preset(summary=summary, config=config)


def _gpt3(size: str, rate: float) -> Preset:
    """Return GPT-3 as in arXiv 2509.24859; rates from arXiv 2005.14165, table 2.1."""
    summary = f"GPT-3 {size.upper()}: mixed nodes of GPUs"
    return _on_gpus(f"gpt3-{size}", summary, rate, seq_len=1_024)


_GPT2_124M = _on_gpus(  # a batch of half a million tokens, as large as the paper's
    "gpt2-124m",
    "GPT-2 124M: one or a few GPUs",
    6e-4,
    warmup_steps=700,
    steps=20_000,
    seq_len=1_024,
    global_batch=480,
    microbatch_size=8,
)
_LLAMA_1B = _on_gpus(  # the largest that trains with AdamW on one 40 GB card
    "llama-1b",
    "Llama 1B: one large GPU or several small ones",
    3e-4,
    warmup_steps=1_000,
    steps=20_000,
    seq_len=2_048,
    global_batch=128,
    microbatch_size=4,
)
_LLAMA2_7B, _LLAMA3_8B, _MIXTRAL_8X7B = (
    _on_gpus(model, summary, rate, seq_len=4_096)
    for model, summary, rate in (
        ("llama2-7b", "Llama-2 7B: a node of 8 large GPUs or more", 3e-4),
        ("llama3-8b", "Llama-3 8B: a node of 8 large GPUs or more", 3e-4),
        ("mixtral-8x7b", "Mixtral 8x7B: several nodes of large GPUs", 2e-4),
    )
)


def _published(model: str, hub: str) -> Preset:
    """Return a preset for a model of the hub; rates from arXiv 2307.09288, table 1."""
    sizes = MODEL_CONFIGS[model]
    large = sizes.hidden_size * sizes.num_blocks >= 64 * 5_120
    return _on_gpus(
        model,
        f"the sizes of {hub}",
        1.5e-4 if large else 3e-4,
        warmup_steps=1_000,
        steps=20_000,
        seq_len=4_096,
        global_batch=128,
    )


PRESETS = {
    preset.config.model: preset
    for preset in (
        _TINY,
        _GPT2_124M,
        _gpt3("1.3b", 2e-4),
        _gpt3("2.6b", 1.6e-4),
        _gpt3("6.7b", 1.2e-4),
        _LLAMA_1B,
        _LLAMA2_7B,
        _LLAMA3_8B,
        _MIXTRAL_8X7B,
        *(_published(model, hub) for model, hub in PUBLISHED.items()),
    )
}


def _own(model: TypedName) -> Preset:
    """Return the preset for a user's own model, with its weights if it has some."""
    folder = Path(model)
    config = None if is_function(model) else named_config(model)
    weights = has_weights(folder)
    speaks = (folder / TOKENIZER).is_file()
    name = model.rpartition(":")[2] if config is None else config.name
    length = 1_024 if config is None else min(1_024, config.max_seq_len)
    rate, warmup_steps = (2e-5, 20) if weights else (3e-4, 200)
    settings = RunConfig(
        model=model,
        init=model if weights else None,
        run_dir=Path(f"runs/{name}"),
        steps=1_000,
        seq_len=length,
        global_batch=32,
        data=DataConfig(tokenizer=folder if speaks else None),
        optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=warmup_steps),
        evaluation=EvaluationConfig(every=100),
    )
    return Preset(summary=f"{name}, a model of your own", config=settings)


def profile_config(preset: Preset) -> ProfileConfig:
    """Return what is measured of a preset by default.

    Besides the usual values, these are the microbatch sizes per data rank, the tensor
    degrees and the remats of the preset and of its plan.

    >>> from hetjax.training.settings.presets import preset
    >>> profile_config(preset("llama-1b")).microbatch_sizes
    (1, 2, 4)
    """
    plan = None if preset.plan is None else read_plan(preset.plan)
    stages = [] if plan is None else plan.stages()
    planned = () if plan is None else plan.replicas
    usual: tuple[Remat, ...] = ("none", "full")
    of_ranks = {planned[r].microbatch_size // s.mesh.data for r, _, s in stages}
    return ProfileConfig(
        simulate=preset.config.simulate,
        seq_len=preset.config.seq_len,
        microbatch_sizes=tuple(
            sorted({1, 2, 4, preset.config.microbatch_size, *of_ranks})
        ),
        tensor=tuple(sorted({1, *(s.mesh.tensor for _, _, s in stages)})),
        remat=tuple(dict.fromkeys((*usual, *(s.remat for _, _, s in stages)))),
        dtype=preset.config.dtype,
    )
