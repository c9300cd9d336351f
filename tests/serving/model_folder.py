# SPDX-License-Identifier: Apache-2.0
"""A small model with a chat tokenizer, in a folder as on the Hugging Face hub."""

import json
import shutil
from pathlib import Path

import numpy as np

from hetjax.models.configs import LlamaConfig
from hetjax.models.hugging_face.known_families import fields_of
from hetjax.models.hugging_face.written import write_model
from hetjax.models.model import Model
from hetjax.models.named import load_named
from tests.models.hugging_face import whole

TOKENIZER = Path(__file__).parents[1] / "data/tokenizers/chatml"
CONFIG = LlamaConfig(
    name="small",
    vocab_size=300,
    hidden_size=16,
    inner_size=24,
    num_blocks=2,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=64,
)


def drawn(path: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return weights that depend on their path alone, with norm scales near one."""
    rng = np.random.default_rng([*path.encode()])
    return rng.normal("norm.scale" in path, 0.2, shape).astype(np.float32)


def write_folder(folder: Path, config: LlamaConfig = CONFIG) -> Path:
    folder.mkdir()
    write_model(folder, config, fields_of(config), drawn, "float32")
    for file in TOKENIZER.iterdir():
        if file.name != "expected.json":
            shutil.copyfile(file, folder / file.name)
    told = {"eos_token_id": [1, 3]}
    (folder / "generation_config.json").write_text(json.dumps(told))
    return folder


def log_likelihoods(folder: Path, texts: list[tuple[list[int], int]]) -> list[float]:
    """Return the log-likelihood (nats) of each token after the tokens before it.

    One jit of the whole model computes all texts, padded at their ends.
    """
    model: Model = load_named(str(folder))
    tokens_BL = np.zeros((len(texts), model.max_seq_len), np.int32)
    for row_L, (before, _) in zip(tokens_BL, texts, strict=True):
        row_L[: len(before)] = before
    params = whole.parameters(model, drawn)
    logits_BLV = whole.logits(model, params, tokens_BL).astype(np.float64)
    found = []
    for logits_LV, (before, token) in zip(logits_BLV, texts, strict=True):
        z_V = logits_LV[len(before) - 1]
        found.append(
            float(z_V[token] - z_V.max() - np.log(np.exp(z_V - z_V.max()).sum()))
        )
    return found
