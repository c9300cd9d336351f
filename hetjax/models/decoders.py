# SPDX-License-Identifier: Apache-2.0
"""The decoder families: GPT, Llama and, with routed experts, Mixtral.

Owns how a config becomes a list of layers: their order, their paths, and whether a
layer is a block or half of one. Does not own the modules it lists nor sizes that have a
name (`presets.py`).
"""

from typing import Any

from hetjax.models import layers
from hetjax.models.attention import Attention, AttentionConfig
from hetjax.models.configs import DecoderConfig, GPTConfig, LlamaConfig, NormConfig
from hetjax.models.head import Head, HeadConfig, padded
from hetjax.models.model import Layer, Model, ModuleSpec
from hetjax.models.moe import Moe, MoeConfig


def model_of(config: DecoderConfig) -> Model:
    """Lay out a config of either family as a model."""
    if isinstance(config, GPTConfig):
        return gpt_model(config)
    assert isinstance(config, LlamaConfig), config
    return llama_model(config)


def gpt_model(config: GPTConfig) -> Model:
    """Learned positions, LayerNorm, GELU, biases, tied embedding."""
    common = _common(config, NormConfig(kind="layer", eps=1e-5))
    attention = AttentionConfig(
        **common,
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        head_size=config.hidden_size // config.num_heads,
        biases="all",
    )
    mlp = layers.MlpConfig(**common, inner_size=4 * config.hidden_size)
    return _decoder(
        config,
        attention,
        ("mlp", layers.GeluMlp, mlp),
        num_positions=config.max_seq_len,
        tied=(("table", "embedding.table"),),
    )


def llama_model(config: LlamaConfig) -> Model:
    """RoPE, RMSNorm, SwiGLU or experts, grouped queries, a head of its own."""
    common = _common(config, config.norm)
    attention = AttentionConfig(
        **common,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.hidden_size // config.num_heads,
        rope_theta=config.rope_theta,
    )
    if config.routing is None:
        mlp = layers.MlpConfig(**common, inner_size=config.inner_size)
        return _decoder(config, attention, ("mlp", layers.SwigluMlp, mlp))
    experts = MoeConfig(**common, inner_size=config.inner_size, routing=config.routing)
    return _decoder(config, attention, ("moe", Moe, experts))


def _common(config: DecoderConfig, norm: NormConfig) -> dict[str, Any]:
    """What attention and MLP have in common."""
    output_std = layers.residual_std(config.num_blocks)
    return {"hidden_size": config.hidden_size, "norm": norm, "output_std": output_std}


def _decoder(
    config: DecoderConfig,
    attention: AttentionConfig,
    feed_forward: tuple[str, type, layers.MlpConfig],  # name, class, config
    num_positions: int = 0,
    tied: tuple[tuple[str, str], ...] = (),
) -> Model:
    """Lay out embedding, equal blocks and head; module paths do not depend on grain."""
    padded_size = padded(config.vocab_size, config.vocab_multiple)
    embedding = layers.EmbeddingConfig(
        padded_vocab_size=padded_size,
        hidden_size=config.hidden_size,
        num_positions=num_positions,
    )
    head = HeadConfig(
        vocab_size=config.vocab_size,
        padded_vocab_size=padded_size,
        hidden_size=config.hidden_size,
        norm=attention.norm,
    )
    halves = ("attention", Attention, attention), feed_forward
    found = [
        Layer("embedding", (ModuleSpec("embedding", layers.Embedding, embedding),))
    ]
    for block in (f"block_{index:03d}" for index in range(config.num_blocks)):
        specs = tuple(ModuleSpec(f"{block}.{n}", cls, half) for n, cls, half in halves)
        if config.grain == "half":
            found += [Layer(spec.path, (spec,)) for spec in specs]
        else:
            found.append(Layer(block, specs))
    found.append(Layer("head", (ModuleSpec("head", Head, head, tied),)))
    return Model(config.name, tuple(found), config.vocab_size, config.max_seq_len)
