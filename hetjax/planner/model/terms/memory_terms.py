# SPDX-License-Identifier: Apache-2.0
"""Computes the memory of layers under the planner's options.

Owns bytes by kind of layer and option, before stages are known. Does not own which
bytes are live at once (`terms.py`, `problem.py`).

Letters of array names: see `problem.py`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hetjax.cluster.catalogue import Precision, compiler_of
from hetjax.cluster.cluster import Node
from hetjax.costs.graph.passes import Shares
from hetjax.costs.layer_bytes import (
    layer_residuals,
    layer_stacks,
    layer_workspace_bytes,
)
from hetjax.costs.measured.layer_profile import DTYPES
from hetjax.costs.stage_memory import StaticBytes, hidden_size, static_bytes
from hetjax.models.model import Model, parameter_count
from hetjax.planner.model.problem import Floats, Option
from hetjax.planner.model.request import PlanRequest
from hetjax.plans.plan import Offload, StageMesh


class KeptBytes(NamedTuple):
    """Bytes that a microbatch keeps on a device, and the workspace (`layer_bytes.py`).

    `least_saved_bytes` is what a layer keeps at least, however layers form stacks.
    """

    saved_bytes: float
    least_saved_bytes: float
    stack_saved_bytes: float
    workspace_bytes: int = 0
    stack_workspace_bytes: int = 0
    spared_workspace_bytes: int = 0


def kept_bytes(
    request: PlanRequest, option: Option, layer: int, shares: Shares
) -> KeptBytes:
    """Return the bytes that a microbatch keeps of one layer.

    Residuals grow by the same bytes with every sequence, so two sizes determine all. In
    a stage that begins with layer 0, layers before the first trained one have no
    backward pass, and the first trained one computes no gradient of its input.
    """
    first = first_trained(request.model)
    if layer < first:
        return KeptBytes(0.0, 0.0, 0.0)
    one, two = (
        layer_residuals(
            request.model,
            layer,
            replace(shares, num_sequences=n),
            option.remat,
            data=option.data,
        )
        for n in (1, 2)
    )
    more = shares.num_sequences - 1
    each, once, alone = (a + more * (b - a) for a, b in zip(one, two, strict=True))
    least = 0.0 if layer == first > 0 else min(alone, each + min(once, 0) / 2)
    workspaces = layer_workspace_bytes(
        layer_stacks(request.model, layer),
        shares,
        option.remat,
        option.data,
        compiler_of(node_of(request, option).device),
    )
    return KeptBytes(each, least, once, *workspaces)


def first_trained(model: Model) -> int:
    """Return the first layer with trained parameters; 0 if there is none."""
    trained = (parameter_count(layer, trained=True) for layer in model.layers)
    return next((at for at, count in enumerate(trained) if count), 0)


def layer_kinds(request: PlanRequest) -> tuple[tuple[int, ...], list[int]]:
    """Return the kind of every layer, by number, and the first layer of each kind.

    Equal layers have different kinds if the profile measured them apart. Layers up to
    the first trained one may keep less than equal later layers (`kept_bytes`).
    """
    layers, first = range(len(request.model.layers)), first_trained(request.model)
    kinds = (
        request.profile.layers if request.profile is not None else ("",) * len(layers)
    )
    each = [
        (layer_stacks(request.model, at), kinds[at], at < first, at == first > 0)
        for at in layers
    ]
    distinct = list(dict.fromkeys(each))
    return tuple(map(distinct.index, each)), list(map(each.index, distinct))


def static_bytes_OK(
    request: PlanRequest,
    options: Sequence[Option],
    firsts: Sequence[int],
    borrowed: bool,
) -> Floats:
    held_OK = _held_bytes_OK(request, options, firsts, borrowed)
    return np.array([[h.total for h in held_K] for held_K in held_OK], np.float64)


def _held_bytes_OK(
    request: PlanRequest,
    options: Sequence[Option],
    firsts: Sequence[int],
    borrowed: bool,
) -> list[list[StaticBytes]]:
    """Return what layers hold; `borrowed` includes tied weights of other layers."""
    stacks_K = [layer_stacks(request.model, at).stacks for at in firsts]
    held = [[s for s in own if borrowed or s.only is None] for own in stacks_K]
    ways_O: list[tuple[StageMesh, Precision, Offload]] = [
        (StageMesh(data=o.data, tensor=o.tensor), precision_of(request, o), o.offload)
        for o in options
    ]
    by_way = {
        way: [
            static_bytes(stacks, *way[:2], request.optimizer, way[2]) for stacks in held
        ]
        for way in set(ways_O)
    }
    return [by_way[way] for way in ways_O]


def updating_bytes_OU(
    request: PlanRequest,
    options: Sequence[Option],
    firsts: Sequence[int],
    counts_KU: Floats,
    *,
    packed: bool,
    surely: bool,
) -> Floats:
    """Return what an update needs besides what a stage holds, for every range of
    layers; `counts_KU` counts the layers of each kind in a range. `surely` restricts
    it to what the update needs whatever the other replicas are.

    New copies of weights are made beside the old. A leaf's gradients are taken out of
    rows if they are `packed` for a sum, and those of one unit are scaled
    (`costs/stage_memory.py`). A leaf of like layers is one array, unless another
    replica is cut between them. CPUs may store the scaled gradients of a whole leaf.
    With `surely`, tied weights of other layers do not count, nor do estimates that a
    compiler's figures may contradict.
    """
    held_OK = _held_bytes_OK(request, options, firsts, borrowed=not surely)
    there_KU, needs = counts_KU > 0, list[Floats]()
    in_one_KU = there_KU if surely else counts_KU
    estimated = not (surely and request.compiled)
    for option, held_K in zip(options, held_OK, strict=True):
        leaves_K, units_K, copies_K = np.array(
            [(h.largest_master, h.largest_unit, h.copies) for h in held_K], np.float64
        ).T
        leaf_U = (leaves_K[:, None] * in_one_KU).max(axis=0)
        scaled_U = 2 * (units_K[:, None] * there_KU).max(axis=0)
        if compiler_of(node_of(request, option).device) == "cpu":
            scaled_U = np.maximum(scaled_U, leaf_U)
        rows_U = leaf_U * (packed or option.data > 1)
        needs.append(copies_K @ counts_KU + estimated * (rows_U + scaled_U))
    return np.array(needs)


def activation_bytes_BO(request: PlanRequest, options: Sequence[Option]) -> Floats:
    elements = request.seq_len * hidden_size(request.model)
    return np.array(
        [
            [
                elements * DTYPES[precision_of(request, o)] * size / o.data
                for o in options
            ]
            for size in request.microbatch_sizes
        ]
    )


def precision_of(request: PlanRequest, option: Option) -> Precision:
    return request.precisions[node_of(request, option).name]


def node_of(request: PlanRequest, option: Option) -> Node:
    return request.classes[option.device_class].nodes[0]
