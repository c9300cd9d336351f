# SPDX-License-Identifier: Apache-2.0
"""Models of the experiments with islands, for their profiles and their workers.

    python -m experiments.islands.models profile MODEL [options of hetjax.profile]

Owns what `python -m hetjax.profile` and a worker process know besides the presets.
"""

import sys
from pathlib import Path

from hetjax.data.dataset import Dataset, prepare
from hetjax.models.gpt import GPTConfig
from hetjax.models.presets import MODEL_CONFIGS
from hetjax.profile import main as profile
from hetjax.training import presets
from hetjax.training.config import OptimizerConfig, RunConfig
from hetjax.training.presets import Preset

_TEXT_CHARS = 400_000
CONFIGS = {
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
}
MODEL_CONFIGS.update(CONFIGS)


def preset(model: str) -> Preset:
    """Return settings of a run of the model."""
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


def own_sources(folder: Path, vocab_size: int) -> Dataset:
    """Return tokens of this package's sources, kept in the folder."""
    text = folder / "text.txt"
    files = sorted(Path(__file__).parents[2].glob("hetjax/**/*.py"))
    text.write_text("\n".join(file.read_text() for file in files)[:_TEXT_CHARS])
    return prepare(folder / "data", text, vocab_size)


for _name in CONFIGS:
    presets.PRESETS[_name] = lambda name=_name: preset(name)

if __name__ == "__main__":
    sys.exit(profile(sys.argv[2:]) if sys.argv[1:2] == ["profile"] else 2)
