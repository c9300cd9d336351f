# SPDX-License-Identifier: Apache-2.0
"""Times transformers' `generate` on a model of ours, in its own process.

    python -m experiments.gpu.models.torch_text llama-1b bfloat16 cuda 512 128

Prints a JSON line: seconds until the first new token and until the last, and peak
memory. Needs PyTorch and transformers.
"""

import json
import sys
import time
from dataclasses import replace
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

from hetjax.models.hugging_face.known_families import fields_of
from hetjax.models.presets import model_config


def measured(
    model_name: str, dtype: str, platform: str, prompt_tokens: int, new_tokens: int
) -> dict[str, Any]:
    """Return the fields of the printed line."""
    on_card = platform == "cuda"
    sizes = model_config(model_name)
    sizes = replace(sizes, max_seq_len=max(sizes.max_seq_len, prompt_tokens))
    config = transformers.AutoConfig.for_model(**fields_of(sizes))
    with torch.device("cuda" if on_card else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=getattr(torch, dtype)
        ).eval()
        prompt_BL = torch.randint(sizes.vocab_size, (1, prompt_tokens))
    model.generation_config.eos_token_id = None  # always generate `new_tokens` tokens

    for _ in range(2):  # the first time warms up
        clock = _Clock()
        found_BL = model.generate(
            prompt_BL,
            attention_mask=torch.ones_like(prompt_BL),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
        )
    assert found_BL.shape[1] == prompt_tokens + new_tokens, found_BL.shape
    first_s, *_, last_s = clock.times_s[1:]  # without the prompt itself
    return {
        "prompt_s": first_s,
        "whole_s": last_s,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_card else None,
    }


class _Clock(transformers.generation.BaseStreamer):
    """Records when the prompt and each token reached the host."""

    def __init__(self) -> None:
        self._begin_s, self.times_s = time.perf_counter(), list[float]()

    def put(self, value: Any) -> None:
        self.times_s.append(time.perf_counter() - self._begin_s)

    def end(self) -> None:
        pass


if __name__ == "__main__":
    model_name, dtype, platform, *numbers = sys.argv[1:]
    prompt_tokens, new_tokens = map(int, numbers)
    print(json.dumps(measured(model_name, dtype, platform, prompt_tokens, new_tokens)))
