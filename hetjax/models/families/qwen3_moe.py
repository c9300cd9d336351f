# SPDX-License-Identifier: Apache-2.0
"""Qwen 3 with experts in place of the MLP of every block."""

from typing import Any

from hetjax.models.configs import LlamaConfig, Routing
from hetjax.models.families.qwen3 import read_qwen3
from hetjax.models.families.shared.family import Family
from hetjax.models.families.shared.fields import (
    COEFFICIENT,
    EXPERTS,
    FLAG,
    WIDTH,
    Fields,
)
from hetjax.models.families.shared.llama_fields import written_llama, written_windows
from hetjax.models.families.shared.tensor_rows import (
    ATTENTION,
    NORM_BETWEEN,
    linear,
    llama_table,
    within,
)

_EXPERTS = {
    "router": linear("mlp.gate"),
    "gate": linear("mlp.experts.{e}.gate_proj"),
    "up": linear("mlp.experts.{e}.up_proj"),
    "down": linear("mlp.experts.{e}.down_proj"),
}


def _read(fields: Fields) -> LlamaConfig:
    fields.require("decoder_sparse_step", 1)
    fields.require("mlp_only_layers", [])
    fields.without_effect("intermediate_size", "num_local_experts")
    routing = Routing(
        num_experts=fields.get("num_experts") or fields["num_local_experts"],
        top_k=fields["num_experts_per_tok"],
        capacity_factor=None,
        balance_coefficient=fields.get("router_aux_loss_coef", 0.0),
        normalized=fields.get("norm_topk_prob", False),
    )
    return read_qwen3(
        fields, inner_size=fields["moe_intermediate_size"], routing=routing
    )


def _write(config: LlamaConfig) -> dict[str, Any] | None:
    if config.routing is None:
        return None
    return {
        **written_llama(config),
        **written_windows(config),
        "num_local_experts": config.routing.num_experts,
        "num_experts": config.routing.num_experts,
        "num_experts_per_tok": config.routing.top_k,
        "router_aux_loss_coef": config.routing.balance_coefficient,
        "moe_intermediate_size": config.inner_size,
        "norm_topk_prob": config.routing.normalized,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=_read,
    write=_write,
    tensors=llama_table(
        {**ATTENTION, **within("moe", {**NORM_BETWEEN, **_EXPERTS})},
    ),
    kinds={
        **dict.fromkeys(
            ("num_experts", "num_local_experts", "num_experts_per_tok"), EXPERTS
        ),
        "moe_intermediate_size": WIDTH,
        "norm_topk_prob": FLAG,
        "router_aux_loss_coef": COEFFICIENT,
    },
    without_effect=("output_router_logits",),
    examples={
        "qwen3_moe": {
            "head_dim": 8,
            "rope_theta": 1e6,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
        }
    },
)
