# SPDX-License-Identifier: Apache-2.0
"""Facts of one layer on one device: bytes, arithmetic and messages, traced once a kind.

Owns what adds up over the layers of a stage, so that any cut can be priced from the
distinct layers alone. Does not own whole stages, which `memory.py` prices to the byte,
nor seconds (`roofline.py`).
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from hetjax.costs.collectives import all_reduces
from hetjax.costs.graph import Cuts, Graph, all_steps
from hetjax.costs.memory import residual_bytes
from hetjax.costs.passes import Shares, passes
from hetjax.costs.runs import StageRuns, runs_of
from hetjax.costs.static import OptimizerInit, static_bytes
from hetjax.models.model import Model
from hetjax.plans.plan import Remat, StageMesh


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFacts:
    """One layer on one device, for one microbatch.

    `saved_bytes` are the residuals that a layer adds to a run of equal ones and
    `run_saved_bytes` those that a run has once; a layer that is alone in its run may
    keep a little more or less. All-reduces count the bytes that enter them.
    """

    static_bytes: int
    forward_flops: int
    backward_flops: int
    saved_bytes: int
    run_saved_bytes: int
    forward_all_reduce_bytes: int
    backward_all_reduce_bytes: int


def layer_runs(model: Model, layer: int) -> StageRuns:
    """Give a layer as a stage of its own; equal layers give equal runs."""
    return runs_of(model, [(layer, layer + 1)])


def layer_facts(
    model: Model,
    layer: int,
    shares: Shares,
    remat: Remat,
    *,
    data: int,
    optimizer: OptimizerInit,
) -> LayerFacts:
    """Give the facts of one layer of the model under a data degree."""
    runs = layer_runs(model, layer)
    mesh = StageMesh(data=data, tensor=shares.tensor)
    return replace(
        _traced(runs, shares, remat, data),
        static_bytes=static_bytes(runs, mesh, shares.dtype, optimizer).total,
    )


@lru_cache(maxsize=1024)
def _traced(runs: StageRuns, shares: Shares, remat: Remat, data: int) -> LayerFacts:
    alone = passes(runs, shares, remat)
    saved_bytes, run_saved_bytes = residual_bytes(alone, data), 0
    if not runs.first and not runs.last:
        two, three = (
            residual_bytes(passes(_times(runs, number), shares, remat), data)
            for number in (2, 3)
        )
        saved_bytes, run_saved_bytes = three - two, 3 * two - 2 * three
    return LayerFacts(
        static_bytes=0,
        forward_flops=product_flops(alone.forward, alone.cuts),
        backward_flops=product_flops(alone.backward, alone.cuts),
        saved_bytes=saved_bytes,
        run_saved_bytes=run_saved_bytes,
        forward_all_reduce_bytes=_all_reduced(alone.forward, alone.cuts),
        backward_all_reduce_bytes=_all_reduced(alone.backward, alone.cuts),
    )


def product_flops(graph: Graph, cuts: Cuts) -> int:
    """Count a device's FLOPs in matrix products, 2 per multiply-add."""
    total = 0
    for step, repeats in all_steps(graph):
        if step.op == "dot_general":
            (of_lhs, _), _ = step.params["dimension_numbers"]
            lhs = cuts.shape(step.inputs[0])
            depth = math.prod(lhs[dim] for dim in of_lhs)
            total += repeats * 2 * depth * math.prod(cuts.shape(step.outputs[0]))
    return total


def _all_reduced(graph: Graph, cuts: Cuts) -> int:
    return sum(size * times for size, times in all_reduces(graph, cuts))


def _times(runs: StageRuns, number: int) -> StageRuns:
    """The layer's units, `number` times in a row."""
    longer = tuple(replace(run, num_units=number * run.num_units) for run in runs.runs)
    return replace(runs, runs=longer)
