# SPDX-License-Identifier: Apache-2.0
"""The GPT family: learned positions, LayerNorm, GELU, biases, tied embedding.

Owns how a `GPTConfig` becomes a list of layers. Does not own the modules it lists.
"""

from dataclasses import dataclass

from hetjax.models.attention import Attention, AttentionConfig
from hetjax.models.blocks import Grain, decoder_layers
from hetjax.models.embedding import (
    Embedding,
    EmbeddingConfig,
    Head,
    HeadConfig,
    padded,
)
from hetjax.models.mlp import GeluMlp, MlpConfig
from hetjax.models.model import Model, ModuleSpec
from hetjax.models.norm import NormConfig
from hetjax.models.parameters import residual_std
from hetjax.models.requirement import require_divides, require_positive

NORM = NormConfig(kind="layer", eps=1e-5)


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """A GPT-2 or GPT-3 shaped decoder; its MLP is 4 x hidden_size wide."""

    name: str
    vocab_size: int
    hidden_size: int
    num_blocks: int
    num_heads: int
    max_seq_len: int = 1024
    vocab_multiple: int = 128
    grain: Grain = "block"

    def __post_init__(self) -> None:
        require_positive(
            self.name,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_blocks=self.num_blocks,
            num_heads=self.num_heads,
            max_seq_len=self.max_seq_len,
            vocab_multiple=self.vocab_multiple,
        )
        hidden = ("hidden_size", self.hidden_size)
        require_divides(self.name, ("num_heads", self.num_heads), hidden)

    @property
    def padded_vocab_size(self) -> int:
        return padded(self.vocab_size, self.vocab_multiple)


def gpt_model(config: GPTConfig) -> Model:
    """Lay out the config as a model."""
    layers = decoder_layers(
        embedding=ModuleSpec("embedding", Embedding, _embedding(config)),
        halves=(
            ("attention", Attention, _attention(config)),
            ("mlp", GeluMlp, _mlp(config)),
        ),
        num_blocks=config.num_blocks,
        head=ModuleSpec(
            "head", Head, _head(config), tied=(("table", "embedding.table"),)
        ),
        grain=config.grain,
    )
    return Model(config.name, layers, config.vocab_size, config.max_seq_len)


def _embedding(config: GPTConfig) -> EmbeddingConfig:
    return EmbeddingConfig(
        padded_vocab_size=config.padded_vocab_size,
        hidden_size=config.hidden_size,
        num_positions=config.max_seq_len,
    )


def _attention(config: GPTConfig) -> AttentionConfig:
    return AttentionConfig(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        head_size=config.hidden_size // config.num_heads,
        norm=NORM,
        biases="all",
        output_std=residual_std(config.num_blocks),
    )


def _mlp(config: GPTConfig) -> MlpConfig:
    return MlpConfig(
        hidden_size=config.hidden_size,
        inner_size=4 * config.hidden_size,
        norm=NORM,
        output_std=residual_std(config.num_blocks),
    )


def _head(config: GPTConfig) -> HeadConfig:
    return HeadConfig(
        vocab_size=config.vocab_size,
        padded_vocab_size=config.padded_vocab_size,
        hidden_size=config.hidden_size,
        norm=NORM,
    )
