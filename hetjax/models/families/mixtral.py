# SPDX-License-Identifier: Apache-2.0
"""Mixtral: Mistral with experts in place of the MLP."""

from typing import Any

from hetjax.models.configs import LlamaConfig, Routing
from hetjax.models.families.shared.family import Family
from hetjax.models.families.shared.fields import COEFFICIENT, EXPERTS, Fields
from hetjax.models.families.shared.llama_fields import read_llama, written_llama
from hetjax.models.families.shared.tensor_rows import (
    ATTENTION,
    NORM_BETWEEN,
    linear,
    llama_table,
    within,
)

_EXPERTS = {
    "router": linear("block_sparse_moe.gate"),
    "gate": linear("block_sparse_moe.experts.{e}.w1"),
    "up": linear("block_sparse_moe.experts.{e}.w3"),
    "down": linear("block_sparse_moe.experts.{e}.w2"),
}


def _read(fields: Fields) -> LlamaConfig:
    routing = Routing(
        num_experts=fields["num_local_experts"],
        top_k=fields["num_experts_per_tok"],
        capacity_factor=None,
        balance_coefficient=fields.get("router_aux_loss_coef", 0.0),
    )
    return read_llama(fields, window=fields.get("sliding_window"), routing=routing)


def _write(config: LlamaConfig) -> dict[str, Any] | None:
    if config.routing is None:
        return None
    return {
        **written_llama(config),
        "num_local_experts": config.routing.num_experts,
        "num_experts_per_tok": config.routing.top_k,
        "router_aux_loss_coef": config.routing.balance_coefficient,
        "sliding_window": config.window,
    }


FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    read=_read,
    write=_write,
    tensors=llama_table(
        {**ATTENTION, **within("moe", {**NORM_BETWEEN, **_EXPERTS})},
    ),
    kinds={
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS,
        "router_aux_loss_coef": COEFFICIENT,
    },
    left_out={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    },
    without_effect=("attention_bias", "mlp_bias", "output_router_logits"),
    examples={
        "mixtral": {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        }
    },
)
