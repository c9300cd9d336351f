# SPDX-License-Identifier: Apache-2.0
"""Defines a device with what the product finds of it, the basis of every prediction."""

from dataclasses import dataclass

import jax

from experiments.gpu.models.one_stage import node_of
from hetjax.cluster.catalogue import (
    DeviceSpec,
    Precision,
    best_precision,
    device_spec,
)
from hetjax.cluster.cluster import Node
from hetjax.plans.attention import Heads, node_attention
from hetjax.plans.plan import AttentionForm


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """`node` and `spec` are those of one device of this kind."""

    device: jax.Device
    node: Node
    spec: DeviceSpec

    @classmethod
    def here(cls, device: jax.Device) -> "Card":
        """Return the card; a kind that the catalogue lacks is measured first."""
        node = node_of(device)
        return cls(device=device, node=node, spec=device_spec(node))

    @property
    def precision(self) -> Precision:
        """The precision that the product uses there by default."""
        return best_precision(self.spec)

    def attention(self, length: int, head_size: int) -> AttentionForm:
        """Return the form of attention that a stage uses there."""
        heads = Heads(seq_len=length, head_sizes=(head_size,))
        return node_attention(self.node, self.precision, heads)
