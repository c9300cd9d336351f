# SPDX-License-Identifier: Apache-2.0
"""Computes the bytes of one layer on one device, with one trace per kind of layer.

Owns the quantities that add up over the layers of a stage, so that the distinct layers
alone suffice to price any cut. Does not own whole stages, which `stage_memory.py`
prices to the byte, nor seconds (`roofline.py`).
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from hetjax.cluster.catalogue import Compiler
from hetjax.costs.graph.passes import Shares, passes
from hetjax.costs.stage_memory import residual_bytes
from hetjax.costs.workspace import workspace_bytes
from hetjax.models.model import Model
from hetjax.plans.plan import Remat
from hetjax.stage.partition import StageStacks, stage_stacks


class LayerResiduals(NamedTuple):
    """Bytes of residuals that one layer keeps on one device between F and B.

    `saved_bytes` are what a layer adds to a stack of equal layers, and
    `stack_saved_bytes` what a stack has once. A layer that is alone in its stack may
    keep a little more or less: `alone_saved_bytes`.
    """

    saved_bytes: int
    stack_saved_bytes: int
    alone_saved_bytes: int


@lru_cache(maxsize=4096)
def layer_stacks(model: Model, layer: int) -> StageStacks:
    """Return a stage that holds only this layer; equal layers give equal stacks."""
    return stage_stacks(model, [(layer, layer + 1)])


def layer_residuals(
    model: Model, layer: int, shares: Shares, remat: Remat, *, data: int
) -> LayerResiduals:
    """Return the bytes of one layer of the model under a data degree."""
    return _residuals(layer_stacks(model, layer), shares, remat, data)


def layer_workspace_bytes(
    held: StageStacks, shares: Shares, remat: Remat, data: int, compiler: Compiler
) -> tuple[int, int, int]:
    """Return the workspace bytes per layer of a stack, those once per stack, and by how
    much the sum of both exceeds the workspace of one layer alone."""
    # the data axis matters only to the compiler for CPUs
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
def _residuals(
    held: StageStacks, shares: Shares, remat: Remat, data: int
) -> LayerResiduals:
    alone = residual_bytes(passes(held, shares, remat), data)
    if held.first or held.last:
        return LayerResiduals(alone, 0, alone)
    two, three = (
        residual_bytes(passes(_times(held, number), shares, remat), data)
        for number in (2, 3)
    )
    return LayerResiduals(three - two, 3 * two - 2 * three, alone)


def _times(held: StageStacks, number: int) -> StageStacks:
    """Return the layer's units, repeated `number` times."""
    longer = tuple(
        stack if stack.only else replace(stack, num_units=number * stack.num_units)
        for stack in held.stacks
    )
    return replace(held, stacks=longer)
