# SPDX-License-Identifier: Apache-2.0
"""The decoder families: GPT, Llama and, with routed experts, Mixtral.

Owns how a config becomes a list of layers: their order, their paths, and whether a
layer is a block or half of one. Does not own the modules it lists nor named sizes
(`presets.py`).
"""

from collections.abc import Callable
from typing import Any

from hetjax.models import layers
from hetjax.models.attention.attention import Attention, AttentionConfig
from hetjax.models.configs import DecoderConfig, GPTConfig, LlamaConfig, NormConfig
from hetjax.models.experts.dropless import DroplessMoe
from hetjax.models.experts.moe import Moe, MoeConfig
from hetjax.models.head import Head, HeadConfig, padded
from hetjax.models.model import Layer, Model, ModuleSpec


def model_of(config: DecoderConfig) -> Model:
    """Lay out a config of either family as a model."""
    if isinstance(config, GPTConfig):
        return gpt_model(config)
    assert isinstance(config, LlamaConfig), config
    return llama_model(config)


def gpt_model(config: GPTConfig) -> Model:
    """Learned positions, LayerNorm, GELU, biases."""
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
        lambda block: attention,
        ("mlp", layers.GeluMlp, mlp),
        num_positions=config.max_seq_len,
    )


def llama_model(config: LlamaConfig) -> Model:
    """RoPE, RMSNorm, gated MLP or experts, grouped queries."""
    common = _common(config, config.norm) | {
        "post_norm": config.norms == "around",
        "residual_scale": config.residual_scale,
    }

    def attention(block: int) -> AttentionConfig:
        windowed, has_rope = config.has_window(block), config.has_rope(block)
        own_theta = config.window_rope_theta if windowed else None
        return AttentionConfig(
            **common,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.size_of_heads,
            biases=config.biases,
            qk_norm=config.norm if config.qk_norm else None,
            query_scale=config.query_scale,
            window=config.window if windowed else None,
            rope_theta=own_theta or config.rope_theta if has_rope else None,
            rope_scaling=config.rope_scaling if has_rope and not own_theta else None,
        )

    widths: dict[str, Any] = common | {
        "inner_size": config.inner_size,
        "activation": config.activation,
    }
    ends: dict[str, Any] = {
        "embedding_scale": config.embedding_scale,
        "logit_divisor": config.logit_divisor,
    }
    if config.routing is None:
        mlp = layers.MlpConfig(**widths, biases=config.mlp_biases)
        return _decoder(config, attention, ("mlp", layers.GatedMlp, mlp), **ends)
    experts = MoeConfig(**widths, routing=config.routing)
    kind = Moe if config.routing.capacity_factor else DroplessMoe
    return _decoder(config, attention, ("moe", kind, experts), **ends)


def _common(config: DecoderConfig, norm: NormConfig) -> dict[str, Any]:
    """Return the settings that attention and MLP share."""
    output_std = layers.residual_std(config.num_blocks)
    return {"hidden_size": config.hidden_size, "norm": norm, "output_std": output_std}


def _decoder(
    config: DecoderConfig,
    attention: Callable[[int], AttentionConfig],  # by block
    feed_forward: tuple[str, type, layers.MlpConfig],  # name, class, config
    *,
    num_positions: int = 0,
    embedding_scale: float = 1.0,
    logit_divisor: float = 1.0,
) -> Model:
    """Lay out embedding, blocks and head; module paths do not depend on grain."""
    padded_size = padded(config.vocab_size, config.vocab_multiple)
    embedding = layers.EmbeddingConfig(
        padded_vocab_size=padded_size,
        hidden_size=config.hidden_size,
        num_positions=num_positions,
        scale=embedding_scale,
    )
    head = HeadConfig(
        vocab_size=config.vocab_size,
        padded_vocab_size=padded_size,
        hidden_size=config.hidden_size,
        norm=attention(0).norm,
        logit_divisor=logit_divisor,
    )
    found = [
        Layer("embedding", (ModuleSpec("embedding", layers.Embedding, embedding),))
    ]
    for index in range(config.num_blocks):
        block = f"block_{index:03d}"
        halves = ("attention", Attention, attention(index)), feed_forward
        specs = tuple(ModuleSpec(f"{block}.{n}", cls, half) for n, cls, half in halves)
        if config.grain == "half":
            found += [Layer(spec.path, (spec,)) for spec in specs]
        else:
            found.append(Layer(block, specs))
    tied = (("table", "embedding.table"),) if config.tied else ()
    found.append(Layer("head", (ModuleSpec("head", Head, head, tied),)))
    return Model(config.name, tuple(found), config.vocab_size, config.max_seq_len)
