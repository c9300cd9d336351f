# SPDX-License-Identifier: Apache-2.0
"""Builds the programs of a cell as the runtime itself does.

Owns the plan that has the cell's stage. The stage and its programs are the product's
own (`hetjax/runtime/execution/`), on devices that are not here.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import optax

from experiments.compile.cells import Cell
from experiments.compile.targets import TARGETS
from hetjax.cluster.discovery import discover
from hetjax.models.attention.attention import head_sizes
from hetjax.models.decoders import model_of
from hetjax.models.model import Model
from hetjax.models.presets import HALVES, model_config
from hetjax.plans.attention import Heads, node_attention
from hetjax.plans.plan import (
    AttentionForm,
    LayerRange,
    Plan,
    Replica,
    Stage,
    StageKey,
    StageMesh,
)
from hetjax.runtime.execution.stage_state import StageState
from hetjax.runtime.execution.stages import Stages

# 11 divides no size of the models, nor any part or sum of sizes. So a multiple of
# SEQ_LEN is always a dim of positions. Kernels' blocks of 256 divide it.
SEQ_LEN = 11 * 256
OPTIMIZER = optax.adamw(1e-3)

# number of blocks, layers of each stage, and the index of the cell's stage
_CUTS: dict[tuple[str, str], tuple[int, tuple[LayerRange, ...], int]] = {
    ("blocks", "first"): (4, ((0, 3), (3, 6)), 0),
    ("blocks", "inner"): (4, ((0, 2), (2, 4), (4, 6)), 1),
    ("blocks", "last"): (4, ((0, 3), (3, 6)), 1),
    ("attention", "first"): (2, ((0, 2), (2, 6)), 0),
    ("attention", "inner"): (2, ((0, 3), (3, 4), (4, 6)), 1),
    ("mlp", "inner"): (2, ((0, 2), (2, 3), (3, 6)), 1),
    ("mlp", "last"): (2, ((0, 4), (4, 6)), 1),
}


# Nodes of a plan's replicas. Digests exist for what several stages hold: for weights if
# their devices are alike, else for gradients.
_NODES: dict[str, tuple[str, ...]] = {
    "weight digests": ("devices", "alike"),
    "gradient digests": ("devices", "unlike"),
}
KINDS = {"devices": "one", "alike": "one", "unlike": "another"}


def model_and_plan(
    cell: Cell, attention: AttentionForm = "chunked"
) -> tuple[Model, Plan, StageKey]:
    """Return a few blocks of the model, a plan of it, and the cell's stage key."""
    part = "blocks" if cell.packed else cell.part
    num_blocks, cuts, index = _CUTS[part, cell.place]
    name = cell.model if part == "blocks" else cell.model + HALVES
    config = replace(model_config(name), num_blocks=num_blocks, max_seq_len=SEQ_LEN)
    nodes = _NODES.get(cell.program, ("devices",))
    plan = Plan(
        model=name,
        seq_len=SEQ_LEN,
        global_batch=2 * cell.data * len(nodes),
        schedule="1f1b",
        packed=cell.packed,
        replicas=tuple(_replica(cell, node, cuts, attention) for node in nodes),
    )
    return model_of(config), plan, (0, index)


def _replica(
    cell: Cell, node: str, cuts: tuple[LayerRange, ...], attention: AttentionForm
) -> Replica:
    stages = tuple(
        Stage(
            node=node,
            devices=tuple(range(cell.tensor * cell.data)),
            mesh=StageMesh(data=cell.data, tensor=cell.tensor),
            layers=layers,
            remat=cell.remat,
            launch_ahead=len(cuts) - number,
            attention=attention,
        )
        for number, layers in enumerate(cuts)
    )
    return Replica(num_microbatches=2, microbatch_size=cell.data, stages=stages)


def attention_of(cell: Cell, devices: Sequence[jax.Device]) -> AttentionForm:
    """Return the form that the product gives the cell's stage on such devices."""
    model, plan, _ = model_and_plan(cell)
    sizes = head_sizes(model)
    heads = Heads(seq_len=SEQ_LEN, head_sizes=sizes, packed=plan.packed)
    return node_attention(discover(devices).nodes[0], TARGETS[cell.target].dtype, heads)


def stage_state(
    cell: Cell,
    devices: Sequence[jax.Device],
    dtype: str,
    attention: AttentionForm = "chunked",
) -> StageState:
    """Return the cell's stage on these devices, with no program compiled."""
    model, plan, key = model_and_plan(cell, attention)
    stages = Stages(
        plan, model, {"devices": devices}, OPTIMIZER, dtype=dtype, kinds=KINDS
    )
    return stages.stages[key]


def compiled_programs(cell: Cell, state: StageState) -> list[Any]:
    """Compile the cell's program, or its programs for each stack or group."""
    programs, updates, checks = state.programs, state.updates, state.checks
    match cell.program:
        case "forward":
            return [programs.forward]
        case "backward":
            return [programs.backward]
        case "fused":
            return [programs.fused]
        case "input gradient":
            return [programs.input_gradient]
        case "weight gradient":
            return [programs.weight_gradient]
        case "evaluate":
            return [programs.evaluate]
        case "pack":
            packed = [group for group in updates.groups if group.rows]
            return [programs.pack(group.leaf_ids, group.rows) for group in packed]
        case "update":
            return updates.stack_updates
        case "square sum":
            return [updates.square_sum]
        case "copies":
            return [updates.copies]
        case "logits":
            return [programs.logits]
        case "zeros":
            return [programs.zeros]
        case "first moments":
            return [updates.init_opt_state]
        case "finite check":
            return [checks.is_finite]
        case "weight digests":
            return [checks.weight_digests]
        case "gradient digests":
            return [checks.gradient_digests]
