# SPDX-License-Identifier: Apache-2.0
"""Defines models of the experiments with islands, their plans, profiles and workers.

    python -m experiments.islands.models profile MODEL [options of hetjax.profile]

Owns what `python -m hetjax.profile` and a worker process know besides the presets.
"""

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from hetjax.data.dataset import Dataset, prepare
from hetjax.data.settings import Ingredients
from hetjax.models.decoders import GPTConfig
from hetjax.models.model import Model
from hetjax.models.presets import MODEL_CONFIGS
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.profile import main as profile
from hetjax.training.settings import presets
from hetjax.training.settings.config import OptimizerConfig, RunConfig
from hetjax.training.settings.presets import Preset

_TEXT_CHARS = 400_000
CONFIGS = {
    "gpt-2x64": GPTConfig(
        name="gpt-2x64",
        vocab_size=512,
        hidden_size=64,
        num_blocks=2,
        num_heads=2,
        max_seq_len=64,
    ),
    "gpt-8x256": GPTConfig(
        name="gpt-8x256",
        vocab_size=512,
        hidden_size=256,
        num_blocks=8,
        num_heads=8,
        max_seq_len=128,
    ),
    "gpt-8x512": GPTConfig(
        name="gpt-8x512",
        vocab_size=512,
        hidden_size=512,
        num_blocks=8,
        num_heads=8,
        max_seq_len=256,
    ),
    "gpt-12x256": GPTConfig(
        name="gpt-12x256",
        vocab_size=512,
        hidden_size=256,
        num_blocks=12,
        num_heads=8,
        max_seq_len=128,
    ),
    "gpt-12x768": GPTConfig(
        name="gpt-12x768",
        vocab_size=512,
        hidden_size=768,
        num_blocks=12,
        num_heads=12,
        max_seq_len=256,
    ),
}
MODEL_CONFIGS.update(CONFIGS)


def preset(model: str) -> Preset:
    """Return the settings of a run of the model."""
    config = CONFIGS[model]
    settings = RunConfig(
        model=model,
        run_dir=Path("runs") / model,
        steps=1000,
        seq_len=config.max_seq_len,
        global_batch=32,
        dtype="float32",
        simulate=True,
        optimizer=OptimizerConfig(),
    )
    return Preset(summary=f"{model}, for experiments", config=settings)


def pipeline(
    model: Model, nodes: Sequence[str], num_microbatches: int, microbatch_size: int
) -> Replica:
    """Return one replica with a stage on each node and blocks shared out evenly."""
    num_layers = len(model.layers)
    inner = [1 + round(n * (num_layers - 2) / len(nodes)) for n in range(1, len(nodes))]
    cuts = pairwise([0, *inner, num_layers])
    stages = tuple(
        Stage(node=node, devices=(0,), layers=layers, launch_ahead=len(nodes) - s)
        for s, (node, layers) in enumerate(zip(nodes, cuts, strict=True))
    )
    return Replica(
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        stages=stages,
    )


def plan_of(model: Model, *replicas: Replica) -> Plan:
    """Return these replicas as a plan of the model, with the longest sequences."""
    batch = sum(r.num_microbatches * r.microbatch_size for r in replicas)
    return Plan(
        model=model.name,
        seq_len=CONFIGS[model.name].max_seq_len,
        global_batch=batch,
        replicas=replicas,
    )


def own_sources(folder: Path, vocab_size: int) -> Dataset:
    """Return tokens of this package's sources, kept in the folder."""
    text = folder / "text.txt"
    files = sorted(Path(__file__).parents[2].glob("hetjax/**/*.py"))
    text.write_text("\n".join(file.read_text() for file in files)[:_TEXT_CHARS])
    return prepare(folder / "data", Ingredients(path=text), vocab_size)


for _name in CONFIGS:
    presets.PRESETS[_name] = preset(_name)

if __name__ == "__main__":
    sys.exit(profile(sys.argv[2:]) if sys.argv[1:2] == ["profile"] else 2)
