# SPDX-License-Identifier: Apache-2.0
"""Tiny models of all families with random weights, made and run by transformers.

    python -m tests.against_transformers.families tests/models/hugging_face/fixtures

writes a folder for each family that has none: the model as transformers saves it,
`tokens.npy`, and `logits.npy`, what transformers makes of these tokens. Tests compare
our models with these where neither transformers nor torch is installed.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf

from hetjax.models.families.shared.family import Family
from hetjax.models.hugging_face.known_families import known_families

SIZES = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _config(family: Family, example: Mapping[str, Any]) -> hf.PretrainedConfig:
    """Return a config with these fields, and sizes by the names of its family."""
    cls = hf.CONFIG_MAPPING[family.model_type]
    known = inspect.signature(cls).parameters
    sizes = {name: size for name, size in SIZES.items() if name in known}
    return cls(**{**sizes, **example})


# all families, by the names of their tiny models
CONFIGS: Mapping[str, Callable[[], hf.PretrainedConfig]] = {
    name: partial(_config, family, example)
    for family in known_families().values()
    for name, example in family.examples.items()
}


def random_model(family: str, seed: int = 0) -> hf.PreTrainedModel:
    """Return a model whose parameters all differ from their defaults."""
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(
        CONFIGS[family](), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def random_tokens(seed: int = 0) -> np.ndarray:
    """Return tokens_BL, longer than any window."""
    return np.random.default_rng(seed).integers(0, 37, (2, 17), np.int32)


def logits(model: hf.PreTrainedModel, tokens_BL: np.ndarray) -> np.ndarray:
    """Return fp32 logits_BLV by transformers and torch."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens_BL.astype(np.int64))).logits.numpy()


def main(folder: Path) -> None:
    """Write the fixtures that are missing."""
    tokens_BL = random_tokens()
    for family in CONFIGS:
        if (folder / family).exists():
            continue
        model = random_model(family)
        model.save_pretrained(folder / family)
        (folder / family / "generation_config.json").unlink(missing_ok=True)
        np.save(folder / family / "tokens.npy", tokens_BL)
        np.save(folder / family / "logits.npy", logits(model, tokens_BL))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
