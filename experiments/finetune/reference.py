# SPDX-License-Identifier: Apache-2.0
"""Repeats the training with transformers and torch, on one device without a plan.

It shares only the batches with the run: torch computes gradients, clips them and
updates. B: sequences, L: tokens of each, V: vocabulary.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

from experiments.finetune import runs
from hetjax.data.batches import Batch, samples
from hetjax.data.dataset import load
from hetjax.data.windows import UNCOUNTED
from hetjax.models.hugging_face.adapters_written import write_adapters
from hetjax.models.hugging_face.configs import read_config
from hetjax.runtime.execution.state import drawn_weights
from hetjax.training.directory.rundir import read_previous
from hetjax.training.run_model import run_model


def batches(run_dir: Path) -> Iterator[Batch]:
    """Yield the batches of every step of the run, in order."""
    previous = read_previous(run_dir)
    assert previous is not None, run_dir
    feed = samples(
        load(previous.dataset).trains,
        runs.SEQ_LEN,
        previous.config.seed,
        is_packed=True,
    )
    for step in range(runs.STEPS):
        yield feed.batch(step, runs.GLOBAL_BATCH)


def train(model: torch.nn.Module, run_dir: Path) -> dict[int, float]:
    """Train the parameters that want gradients; return the losses by step."""
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


def first_adapters(run_dir: Path, folder: Path) -> None:
    """Write the adapters that a run starts with, so that PEFT starts with them, too."""
    previous = read_previous(run_dir)
    assert previous is not None, run_dir
    config = previous.config
    model, (sizes, fields) = run_model(config), read_config(Path(config.model))
    folder.mkdir()
    write_adapters(
        folder,
        sizes,
        fields["model_type"],
        model,
        config.lora,
        drawn_weights(model, config.seed),
        np.dtype(np.float32),
        base=config.model,
    )


def logits(model: torch.nn.Module, tokens_BL: np.ndarray) -> np.ndarray:
    """Return logits_BLV in float32."""
    with torch.no_grad():
        return model(_tensor(tokens_BL)).logits.numpy()


def _adamw(trained: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return an AdamW that decays matrices, not norms."""
    decays = {"weight_decay": runs.WEIGHT_DECAY}
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], **decays},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    kept = [group for group in groups if group["params"]]
    return torch.optim.AdamW(kept, lr=runs.LEARNING_RATE, betas=runs.BETAS, eps=1e-8)


def _loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy of counted targets, each document seen alone."""
    sums = [_loss_sum(model, *document) for document in _documents(batch)]
    return torch.stack(sums).sum() / int(np.count_nonzero(batch[1] != UNCOUNTED))


def _documents(batch: Batch) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the tokens_L and targets_L of each document of a packed batch."""
    for tokens_L, targets_L, documents_L in zip(*batch, strict=True):
        for number in range(1, documents_L.max() + 1):
            own = documents_L == number
            yield tokens_L[own], targets_L[own]


def _loss_sum(
    model: torch.nn.Module, tokens_L: np.ndarray, targets_L: np.ndarray
) -> torch.Tensor:
    logits_LV = model(_tensor(tokens_L[None])).logits[0]
    return torch.nn.functional.cross_entropy(
        logits_LV, _tensor(targets_L), ignore_index=UNCOUNTED, reduction="sum"
    )


def _tensor(tokens_BL: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(tokens_BL.astype(np.int64))
