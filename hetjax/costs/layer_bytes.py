# SPDX-License-Identifier: Apache-2.0
"""Bytes of one layer on one device, traced once a kind.

Owns what adds up over the layers of a stage, so that any cut can be priced from the
distinct layers alone. Does not own whole stages, which `stage_memory.py` prices to the
byte, nor seconds (`roofline.py`).
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from hetjax.cluster.catalogue import Compiler
from hetjax.costs.graph.passes import Shares, passes
from hetjax.costs.stage_memory import residual_bytes, static_bytes
from hetjax.costs.workspace import workspace_bytes
from hetjax.models.model import Model
from hetjax.plans.plan import Remat, StageMesh
from hetjax.stage.arrays import OptimizerInit
from hetjax.stage.partition import StageStacks, stage_stacks


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFacts:
    """One layer on one device: what lives through the step and between F and B.

    `saved_bytes` are the residuals that a layer adds to a stack of equal ones and
    `stack_saved_bytes` those that a stack has once; a layer that is alone in it may
    keep a little more or less: `alone_saved_bytes`.
    """

    static_bytes: int
    saved_bytes: int
    stack_saved_bytes: int
    alone_saved_bytes: int


@lru_cache(maxsize=4096)
def layer_stacks(model: Model, layer: int) -> StageStacks:
    """Give a layer as a stage of its own; equal layers give equal stacks."""
    return stage_stacks(model, [(layer, layer + 1)])


def layer_facts(
    model: Model,
    layer: int,
    shares: Shares,
    remat: Remat,
    *,
    data: int,
    optimizer: OptimizerInit,
) -> LayerFacts:
    """Give the bytes of one layer of the model under a data degree."""
    held = layer_stacks(model, layer)
    mesh = StageMesh(data=data, tensor=shares.tensor)
    saved_bytes, stack_saved_bytes, alone_bytes = _saved_bytes(
        held, shares, remat, data
    )
    return LayerFacts(
        static_bytes=static_bytes(held.stacks, mesh, shares.dtype, optimizer).total,
        saved_bytes=saved_bytes,
        stack_saved_bytes=stack_saved_bytes,
        alone_saved_bytes=alone_bytes,
    )


def layer_workspace_bytes(
    held: StageStacks, shares: Shares, remat: Remat, data: int, compiler: Compiler
) -> tuple[int, int, int]:
    """Give what programs need while they run: for every layer of a stack, and besides;
    and how much less that is for one layer alone."""
    # the data axis only shows in what a CPU's compiler makes of it
    ranks = data if compiler == "cpu" else 1
    return _layer_workspace_bytes(held, shares, remat, ranks, compiler)


@lru_cache(maxsize=4096)
def _layer_workspace_bytes(
    held: StageStacks, shares: Shares, remat: Remat, data: int, compiler: Compiler
) -> tuple[int, int, int]:
    numbers = (1,) if held.first or held.last else (1, 2, 3)
    alone, *longer = (
        workspace_bytes(passes(_times(held, number), shares, remat), data, compiler)
        for number in numbers
    )
    if not longer:
        return 0, alone, 0
    two, three = longer
    each = max(three - two, 0)
    once = max(alone - each, two - 2 * each)
    return each, once, each + once - alone


@lru_cache(maxsize=1024)
def _saved_bytes(
    held: StageStacks, shares: Shares, remat: Remat, data: int
) -> tuple[int, int, int]:
    """Residuals of each layer of a stack, and of the stack; of one layer alone."""
    alone = residual_bytes(passes(held, shares, remat), data)
    if held.first or held.last:
        return alone, 0, alone
    two, three = (
        residual_bytes(passes(_times(held, number), shares, remat), data)
        for number in (2, 3)
    )
    return three - two, 3 * two - 2 * three, alone


def _times(held: StageStacks, number: int) -> StageStacks:
    """The layer's units, `number` times in a row."""
    longer = tuple(
        stack if stack.only else replace(stack, num_units=number * stack.num_units)
        for stack in held.stacks
    )
    return replace(held, stacks=longer)
