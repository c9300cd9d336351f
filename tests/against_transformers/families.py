# SPDX-License-Identifier: Apache-2.0
"""Tiny models of all families with random weights, made and judged by transformers.

    python -m tests.against_transformers.families tests/models/hugging_face/fixtures

writes for each a folder as transformers saves it, `tokens.npy`, and `logits.npy`: what
transformers makes of these tokens, which tests hold our models against where neither it
nor torch is installed.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers as hf

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
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_QWEN3 = {"head_dim": 8, "rope_theta": 1e6}
CONFIGS: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "llama2": lambda: hf.LlamaConfig(**SIZES),
    "llama3": lambda: hf.LlamaConfig(
        **SIZES, head_dim=8, rope_parameters=_LLAMA3, tie_word_embeddings=True
    ),
    "mistral": lambda: hf.MistralConfig(**SIZES, sliding_window=5),
    "mixtral": lambda: hf.MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "qwen2": lambda: hf.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2_window": lambda: hf.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "qwen3": lambda: hf.Qwen3Config(**SIZES, **_QWEN3),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **SIZES,
        **_QWEN3,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        norm_topk_prob=True,
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **SIZES,
        head_dim=8,
        sliding_window=5,
        query_pre_attn_scalar=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=_GEMMA_ROPE,
    ),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=37,
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
    ),
}


def random_model(family: str, seed: int = 0) -> hf.PreTrainedModel:
    """Give a model none of whose parameters is what it would be by itself."""
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(
        CONFIGS[family](), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def random_tokens(seed: int = 0) -> np.ndarray:
    """Give tokens_BL, longer than any window."""
    return np.random.default_rng(seed).integers(0, 37, (2, 17), np.int32)


def logits(model: hf.PreTrainedModel, tokens_BL: np.ndarray) -> np.ndarray:
    """Give fp32 logits_BLV by transformers and torch."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens_BL.astype(np.int64))).logits.numpy()


def main(folder: Path) -> None:
    """Write all fixtures."""
    tokens_BL = random_tokens()
    for family in CONFIGS:
        model = random_model(family)
        model.save_pretrained(folder / family)
        (folder / family / "generation_config.json").unlink(missing_ok=True)
        np.save(folder / family / "tokens.npy", tokens_BL)
        np.save(folder / family / "logits.npy", logits(model, tokens_BL))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
