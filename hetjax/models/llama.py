# SPDX-License-Identifier: Apache-2.0
"""The Llama family: RoPE, RMSNorm, SwiGLU, grouped queries, own head; Mixtral too.

Owns how a `LlamaConfig` becomes a list of layers; with a `routing` the MLP of each
block is a mixture of experts (Mixtral). Does not own the modules it lists.
"""

from dataclasses import dataclass

from hetjax.models.attention import Attention, AttentionConfig
from hetjax.models.blocks import Grain, Half, decoder_layers
from hetjax.models.embedding import (
    Embedding,
    EmbeddingConfig,
    Head,
    HeadConfig,
    padded,
)
from hetjax.models.mlp import MlpConfig, SwigluMlp
from hetjax.models.model import Model, ModuleSpec
from hetjax.models.moe import Moe, MoeConfig, Routing
from hetjax.models.norm import NormConfig
from hetjax.models.parameters import residual_std
from hetjax.models.requirement import require_divides, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """A Llama or (with `routing`) Mixtral shaped decoder."""

    name: str
    vocab_size: int
    hidden_size: int
    inner_size: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int
    max_seq_len: int
    rope_theta: float = 10_000.0
    norm: NormConfig = NormConfig(kind="rms", eps=1e-5)
    routing: Routing | None = None  # None: one dense MLP per block
    vocab_multiple: int = 128
    grain: Grain = "block"

    def __post_init__(self) -> None:
        require_positive(
            self.name,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            inner_size=self.inner_size,
            num_blocks=self.num_blocks,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            max_seq_len=self.max_seq_len,
            vocab_multiple=self.vocab_multiple,
        )
        heads = ("num_heads", self.num_heads)
        require_divides(self.name, heads, ("hidden_size", self.hidden_size))
        require_divides(self.name, ("num_kv_heads", self.num_kv_heads), heads)

    @property
    def padded_vocab_size(self) -> int:
        return padded(self.vocab_size, self.vocab_multiple)


def llama_model(config: LlamaConfig) -> Model:
    """Lay out the config as a model."""
    layers = decoder_layers(
        embedding=ModuleSpec("embedding", Embedding, _embedding(config)),
        halves=(("attention", Attention, _attention(config)), _feed_forward(config)),
        num_blocks=config.num_blocks,
        head=ModuleSpec("head", Head, _head(config)),
        grain=config.grain,
    )
    return Model(config.name, layers, config.vocab_size, config.max_seq_len)


def _embedding(config: LlamaConfig) -> EmbeddingConfig:
    return EmbeddingConfig(
        padded_vocab_size=config.padded_vocab_size, hidden_size=config.hidden_size
    )


def _attention(config: LlamaConfig) -> AttentionConfig:
    return AttentionConfig(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.hidden_size // config.num_heads,
        norm=config.norm,
        rope_theta=config.rope_theta,
        output_std=residual_std(config.num_blocks),
    )


def _feed_forward(config: LlamaConfig) -> Half:
    dense = MlpConfig(
        hidden_size=config.hidden_size,
        inner_size=config.inner_size,
        norm=config.norm,
        output_std=residual_std(config.num_blocks),
    )
    if config.routing is None:
        return "mlp", SwigluMlp, dense
    routed = MoeConfig(
        hidden_size=dense.hidden_size,
        inner_size=dense.inner_size,
        routing=config.routing,
        norm=dense.norm,
        output_std=dense.output_std,
    )
    return "moe", Moe, routed


def _head(config: LlamaConfig) -> HeadConfig:
    return HeadConfig(
        vocab_size=config.vocab_size,
        padded_vocab_size=config.padded_vocab_size,
        hidden_size=config.hidden_size,
        norm=config.norm,
    )
