# SPDX-License-Identifier: Apache-2.0
"""Trains the same model as most people would: transformers under `torch.compile`.

Sizes, microbatches, tokens and clipping are equal. Masters are fp32; autocast computes
products in the card's own precision; AdamW is fused; attention is scaled-dot-product.
Needs PyTorch and transformers. Owns the training step; `way.py` owns the process.
"""

from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

from experiments.gpu.models.one_stage import CLIP_NORM
from experiments.gpu.models.way import Task, Trained
from hetjax.models.hugging_face.known_families import fields_of
from hetjax.models.presets import model_config

_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def by_torch(task: Task) -> Trained:
    """Return the task's model, which compiles at its first step."""
    torch.manual_seed(0)
    on_card = task.platform == "cuda"
    device = torch.device("cuda" if on_card else "cpu")
    precision = getattr(torch, task.precision)
    model = _model(task).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_card)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == torch.float16)
    num_sequences = task.microbatches * task.size
    tokens_GL = torch.randint(
        model.config.vocab_size, (num_sequences, task.seq_len + 1), device=device
    )
    inputs_GL, targets_GL = tokens_GL[:, :-1], tokens_GL[:, 1:]

    def loss(inputs_BL: Any, targets_BL: Any) -> Any:
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            logits_BLV = model(inputs_BL, use_cache=False).logits
        return functional.cross_entropy(
            logits_BLV.float().flatten(0, 1), targets_BL.flatten(), reduction="sum"
        )

    compiled = torch.compile(loss)

    def step() -> None:
        for inputs_BL, targets_BL in zip(
            inputs_GL.split(task.size), targets_GL.split(task.size), strict=True
        ):
            scaler.scale(
                compiled(inputs_BL, targets_BL) / targets_GL.numel()
            ).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if on_card:
            torch.cuda.synchronize()

    def peak_bytes() -> int | None:
        return torch.cuda.max_memory_allocated() if on_card else None

    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Trained(step=step, peak_bytes=peak_bytes, about={"parameters": parameters})


def _model(task: Task) -> Any:
    """Return transformers' model of the same sizes, in fp32 with random weights."""
    fields = fields_of(model_config(task.model)) | _NO_DROPOUT
    fields["max_position_embeddings"] = task.seq_len
    config = transformers.AutoConfig.for_model(**fields)
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=torch.float32
    )
