# SPDX-License-Identifier: Apache-2.0
"""The same training by transformers and torch, on one device and without a plan.

It sees the batches of the run and nothing else of it: torch makes gradients, clips them
and updates. B: sequences, L: tokens of each, V: vocabulary.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from experiments.finetune import runs
from hetjax.data.batches import UNCOUNTED, Batch, samples
from hetjax.data.dataset import load
from hetjax.training.rundir import read_previous


def batches(run_dir: Path) -> Iterator[Batch]:
    """The batches of every step of the run, in order."""
    previous = read_previous(run_dir)
    assert previous is not None, run_dir
    feed = samples(load(previous.dataset).train, runs.SEQ_LEN, previous.config.seed)
    for step in range(runs.STEPS):
        yield feed.batch(step, runs.GLOBAL_BATCH)


def train(model: torch.nn.Module, run_dir: Path) -> dict[int, float]:
    """Train the parameters that want gradients; give the losses by step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = _adamw(trained)
    found = {}
    for step, batch in enumerate(batches(run_dir), start=1):
        loss = _loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, runs.CLIP_NORM)
        optimizer.step()
        found[step] = loss.item()
    return found


def logits(model: torch.nn.Module, tokens_BL: np.ndarray) -> np.ndarray:
    """logits_BLV in float32."""
    with torch.no_grad():
        return model(_tensor(tokens_BL)).logits.numpy()


def _adamw(trained: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW that lets matrices decay, not norms."""
    decays = {"weight_decay": runs.WEIGHT_DECAY}
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], **decays},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    kept = [group for group in groups if group["params"]]
    return torch.optim.AdamW(kept, lr=runs.LEARNING_RATE, betas=runs.BETAS, eps=1e-8)


def _loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy of the targets that count."""
    tokens_BL, targets_BL = map(_tensor, batch)
    logits_BLV = model(tokens_BL).logits
    return torch.nn.functional.cross_entropy(
        logits_BLV.flatten(0, 1), targets_BL.flatten(), ignore_index=UNCOUNTED
    )


def _tensor(tokens_BL: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(tokens_BL.astype(np.int64))
