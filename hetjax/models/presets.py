# SPDX-License-Identifier: Apache-2.0
"""Defines named model sizes.

Owns the table of presets and the look-up by name. `published.toml` has the fields of
`config.json` for published models: such a preset equals an import of that file. Does
not own what a run adds to a model (data, plan, optimizer).
"""

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from hetjax.errors import BadInput
from hetjax.files.parsing import toml_table
from hetjax.models.configs import DecoderConfig, GPTConfig, LlamaConfig, Routing
from hetjax.models.hugging_face.configs import config_of

if TYPE_CHECKING:
    from hetjax.models.model import Model

HALVES = "-halves"


def model_preset(name: str) -> "Model":
    """Return the model of that name; raises BadInput as `model_config` does."""
    from hetjax.models.decoders import model_of  # importing JAX takes a second

    return model_of(model_config(name))


def is_model_preset(name: str) -> bool:
    """Return whether `model_config` knows the name."""
    return name.removesuffix(HALVES) in MODEL_CONFIGS


def model_config(name: str) -> DecoderConfig:
    """Return the sizes of that name; BadInput names the nearest if there is none.

    With `-halves` after the name, attention and MLP are separate layers, so that plans
    may cut between them. The parameters are the same.
    """
    if name in MODEL_CONFIGS:
        return MODEL_CONFIGS[name]
    whole = name.removesuffix(HALVES)
    if whole in MODEL_CONFIGS:
        return replace(MODEL_CONFIGS[whole], name=name, grain="half")
    names = sorted(MODEL_CONFIGS)
    near = get_close_matches(name.lower(), names, n=3) or ["tiny"]
    raise BadInput(
        got=f"model preset {name!r}",
        allowed=f"{', '.join(names)}; each with {HALVES} to cut blocks in two",
        fix=f"did you mean {' or '.join(near)}?",
    )


def _gpt3(name: str, hidden_size: int, num_blocks: int, num_heads: int) -> GPTConfig:
    """Return Hapt/HARP's GPT-3 (arXiv 2509.24859): length 1024, vocabulary 51200."""
    return GPTConfig(
        name=name,
        vocab_size=51_200,
        hidden_size=hidden_size,
        num_blocks=num_blocks,
        num_heads=num_heads,
    )


TINY = LlamaConfig(
    name="tiny",
    vocab_size=1_024,
    hidden_size=128,
    inner_size=352,
    num_blocks=4,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=128,
)
GPT2_124M = GPTConfig(  # 47 rows of padding: 36,096 parameters above the published
    name="gpt2-124m", vocab_size=50_257, hidden_size=768, num_blocks=12, num_heads=12
)
LLAMA_1B = LlamaConfig(  # the blocks of Llama-3.2-1B, 32000 tokens, own head: 1.10 B
    name="llama-1b",
    vocab_size=32_000,
    hidden_size=2_048,
    inner_size=8_192,
    num_blocks=16,
    num_heads=32,
    num_kv_heads=8,
    max_seq_len=4_096,
    rope_theta=500_000.0,
)
LLAMA2_7B = LlamaConfig(
    name="llama2-7b",
    vocab_size=32_000,
    hidden_size=4_096,
    inner_size=11_008,
    num_blocks=32,
    num_heads=32,
    num_kv_heads=32,
    max_seq_len=4_096,
)
LLAMA3_8B = replace(
    LLAMA2_7B,
    name="llama3-8b",
    vocab_size=128_256,
    inner_size=14_336,
    num_kv_heads=8,
    max_seq_len=8_192,
    rope_theta=500_000.0,
)
MIXTRAL_8X7B = replace(
    LLAMA3_8B,
    name="mixtral-8x7b",
    vocab_size=32_000,
    max_seq_len=4_096,
    rope_theta=1_000_000.0,
    routing=Routing(num_experts=8, top_k=2),
)
_OF_HUB = toml_table((Path(__file__).parent / "published.toml").read_text())
PUBLISHED = {name: str(fields["_name_or_path"]) for name, fields in _OF_HUB.items()}
MODEL_CONFIGS: dict[str, DecoderConfig] = {
    config.name: config
    for config in (
        TINY,
        GPT2_124M,
        _gpt3("gpt3-1.3b", 2_048, 24, 32),
        _gpt3("gpt3-2.6b", 2_560, 32, 32),
        _gpt3("gpt3-6.7b", 4_096, 32, 32),
        LLAMA_1B,
        LLAMA2_7B,
        LLAMA3_8B,
        MIXTRAL_8X7B,
        *(config_of(fields, name) for name, fields in _OF_HUB.items()),
    )
}
