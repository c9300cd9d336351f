# SPDX-License-Identifier: Apache-2.0
"""Complete settings for named runs, each a function.

Owns what `python -m hetjax.train PRESET` starts from. Does not own the sizes of models
(`hetjax/models/presets.py`).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hetjax.cluster.files import preset_path
from hetjax.cluster.record import did_you_mean
from hetjax.errors import BadInput
from hetjax.training.config import (
    CheckpointConfig,
    EvaluationConfig,
    OptimizerConfig,
    RunConfig,
)

_PLANS = Path(__file__).parent / "plans"


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Settings to start from, and the cluster and plan that go with them, if any."""

    summary: str
    config: RunConfig
    cluster: Path | None = None
    plan: Path | None = None


def preset(name: str) -> Preset:
    """Return the preset of that name; BadInput names the nearest if there is none."""
    if name not in PRESETS:
        raise BadInput(
            got=f"preset {name!r}",
            allowed=f"one of {', '.join(PRESETS)}",
            fix=did_you_mean(name, list(PRESETS)),
        )
    return PRESETS[name]()


def check_plan_or_preset(given: str) -> None:
    """Raise BadInput for what is neither a file that is there nor a preset."""
    # Path.exists raises for a name that is too long
    if given not in PRESETS and not os.path.exists(given):
        shown = given if len(given) < 80 else f"{given[:77]}..."
        raise BadInput(
            got=f"{shown!r}, which is neither a file nor a preset",
            allowed=f"a plan file, or a preset of {', '.join(PRESETS)}",
            fix=did_you_mean(given, list(PRESETS)),
        )


def tiny() -> Preset:
    """Unlike replicas on five simulated devices; minutes on two CPU cores."""
    return Preset(
        summary="1M Llama on 5 simulated devices, unlike replicas; minutes on a CPU",
        config=RunConfig(
            model="tiny",
            run_dir=Path("runs/tiny"),
            steps=160,
            seq_len=64,
            global_batch=48,
            dtype="float32",
            simulate=True,
            optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20),
            evaluation=EvaluationConfig(every=100, num_batches=4, prompt="Return the"),
            checkpoint=CheckpointConfig(every=100),
        ),
        cluster=preset_path("tiny"),
        plan=_PLANS / "tiny.json",
    )


def gpt2_124m() -> Preset:
    """GPT-2 small, the batch of half a million tokens of the paper's scale."""
    return Preset(
        summary="GPT-2 124M: one or a few GPUs",
        config=RunConfig(
            model="gpt2-124m",
            run_dir=Path("runs/gpt2-124m"),
            steps=20_000,
            seq_len=1_024,
            global_batch=480,
            microbatch_size=8,
            optimizer=OptimizerConfig(learning_rate=6e-4, warmup_steps=700),
        ),
    )


def llama_1b() -> Preset:
    """The largest that trains with AdamW on one 40 GB card."""
    return Preset(
        summary="Llama 1B: one large GPU or several small ones",
        config=RunConfig(
            model="llama-1b",
            run_dir=Path("runs/llama-1b"),
            steps=20_000,
            seq_len=2_048,
            global_batch=128,
            microbatch_size=4,
            optimizer=OptimizerConfig(warmup_steps=1_000),
        ),
    )


def llama2_7b() -> Preset:
    return _large("llama2-7b", "Llama-2 7B: a node of 8 large GPUs or more", 3e-4)


def llama3_8b() -> Preset:
    return _large("llama3-8b", "Llama-3 8B: a node of 8 large GPUs or more", 3e-4)


def mixtral_8x7b() -> Preset:
    return _large("mixtral-8x7b", "Mixtral 8x7B: several nodes of large GPUs", 2e-4)


def gpt3_1_3b() -> Preset:
    return _gpt3("1.3b", 2e-4)


def gpt3_2_6b() -> Preset:
    return _gpt3("2.6b", 1.6e-4)


def gpt3_6_7b() -> Preset:
    return _gpt3("6.7b", 1.2e-4)


def _gpt3(size: str, learning_rate: float) -> Preset:
    """GPT-3 as in arXiv 2509.24859, with the rates of arXiv 2005.14165, table 2.1."""
    return Preset(
        summary=f"GPT-3 {size.upper()}: mixed nodes of GPUs",
        config=RunConfig(
            model=f"gpt3-{size}",
            run_dir=Path(f"runs/gpt3-{size}"),
            steps=100_000,
            seq_len=1_024,
            global_batch=1_024,
            optimizer=OptimizerConfig(learning_rate=learning_rate, warmup_steps=2_000),
        ),
    )


def _large(model: str, summary: str, learning_rate: float) -> Preset:
    return Preset(
        summary=summary,
        config=RunConfig(
            model=model,
            run_dir=Path(f"runs/{model}"),
            steps=100_000,
            seq_len=4_096,
            global_batch=1_024,
            optimizer=OptimizerConfig(learning_rate=learning_rate, warmup_steps=2_000),
        ),
    )


PRESETS: dict[str, Callable[[], Preset]] = {
    "tiny": tiny,
    "gpt2-124m": gpt2_124m,
    "gpt3-1.3b": gpt3_1_3b,
    "gpt3-2.6b": gpt3_2_6b,
    "gpt3-6.7b": gpt3_6_7b,
    "llama-1b": llama_1b,
    "llama2-7b": llama2_7b,
    "llama3-8b": llama3_8b,
    "mixtral-8x7b": mixtral_8x7b,
}
