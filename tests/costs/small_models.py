# SPDX-License-Identifier: Apache-2.0
"""Models small enough to compile in a second, plans over them, and small graphs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hetjax.costs.graph.values import Dims, Graph, Origin, graph_of
from hetjax.models.decoders import GPTConfig, LlamaConfig, gpt_model, llama_model
from hetjax.models.experts.moe import Routing
from hetjax.models.finetuning import LoraConfig, with_adapters
from hetjax.models.model import Model
from hetjax.plans.plan import (
    AttentionForm,
    LayerRange,
    Plan,
    Remat,
    Replica,
    Stage,
    StageMesh,
)

SEQ_LEN, WIDTH, INNER, NUM_BLOCKS = 32, 64, 176, 4


def family(name: str) -> Model:
    """A GPT, Llama, Llama with adapters or mixture of experts with four blocks."""
    sizes: dict[str, Any] = dict(
        vocab_size=256,
        hidden_size=WIDTH,
        num_blocks=NUM_BLOCKS,
        num_heads=4,
        max_seq_len=SEQ_LEN,
    )
    if name == "gpt":
        return gpt_model(GPTConfig(name=name, **sizes))
    routing = Routing(num_experts=4, top_k=2) if name == "moe" else None
    inner = LlamaConfig(
        name=name, **sizes, inner_size=INNER, num_kv_heads=2, routing=routing
    )
    model = llama_model(inner)
    return with_adapters(model, LoraConfig(rank=4)) if name == "adapted" else model


def pipeline(
    model: Model,
    *cuts: LayerRange,
    mesh: StageMesh,
    remat: Remat = "none",
    microbatch_size: int = 4,
    attention: AttentionForm | None = None,
) -> Plan:
    """Return one replica of equal meshes, each on the first devices of node "n"."""
    stages = tuple(
        Stage(
            node="n",
            devices=tuple(range(mesh.data * mesh.tensor)),
            mesh=mesh,
            layers=layers,
            remat=remat,
            launch_ahead=len(cuts) - s,
            attention=attention,
        )
        for s, layers in enumerate(cuts)
    )
    replica = Replica(
        num_microbatches=2, microbatch_size=microbatch_size, stages=stages
    )
    return Plan(
        model=model.name,
        seq_len=SEQ_LEN,
        global_batch=2 * microbatch_size,
        replicas=(replica,),
    )


def traced(function: Callable[..., object], *shapes: tuple[int, ...]) -> Graph:
    """Trace a function of float32 arrays of these shapes."""
    abstract = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    dims = Dims()
    inputs = [dims.value(a.shape, a.dtype, Origin.BATCH) for a in abstract]
    return graph_of(jax.make_jaxpr(function)(*abstract), inputs, dims)
