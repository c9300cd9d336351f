# SPDX-License-Identifier: Apache-2.0
"""Qwen 3: Qwen 2 without its biases, and with normalised queries and keys."""

from typing import Any

from hetjax.models.configs import LlamaConfig
from hetjax.models.families.qwen2 import late_windows
from hetjax.models.families.shared.family import Family
from hetjax.models.families.shared.fields import Fields
from hetjax.models.families.shared.llama_fields import (
    read_llama,
    read_windows,
    written_llama,
    written_windows,
)
from hetjax.models.families.shared.tensor_rows import DENSE


def read_qwen3(fields: Fields, **own: Any) -> LlamaConfig:
    """Return the config of a Qwen 3, with experts (`own`) or without."""
    fields.require("attention_bias", False)
    windows = read_windows(fields, late_windows(fields))
    return read_llama(fields, qk_norm=True, **windows, **own)


def _write(config: LlamaConfig) -> dict[str, Any]:
    return {**written_llama(config), **written_windows(config)}


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read=read_qwen3,
    write=_write,
    tensors=DENSE,
    left_out={"head_dim": 128},
    examples={"qwen3": {"head_dim": 8, "rope_theta": 1e6}},
)
