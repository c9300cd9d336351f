# SPDX-License-Identifier: Apache-2.0
"""Turns a request into a planning problem: the costs of every kind of layer and option.

Owns two views of the same costs. The search problem uses the memory that the simulator
will demand, and gradient sums over the slowest way between nodes, or between like
nodes. The bound problem charges nothing that some plan of the space could avoid: memory
for one microbatch in flight, hops between the nearest nodes, and gradient sums over the
fastest way. Does not own the costs (`costs/`) nor the costs of whole pipelines
(`problem.py`, `templates.py`).

Letters of array names: see `problem.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import Any, Literal

import numpy as np

from hetjax.cluster.catalogue import compiler_of
from hetjax.cluster.memory_budget import node_plan_bytes
from hetjax.costs.graph.passes import Shares
from hetjax.costs.network.wire_bytes import GRADIENT_BYTES
from hetjax.costs.stage_memory import SCALAR_BYTES, hidden_size
from hetjax.errors import BadInput
from hetjax.models.model import parameter_count
from hetjax.planner.model.deadline import check_stopped
from hetjax.planner.model.hops import (
    Holders,
    hop_tables,
    most_sum_bytes_per_s,
    sync_bytes_per_s,
)
from hetjax.planner.model.problem import (
    UNLIMITED,
    DeviceClass,
    Floats,
    LayerCosts,
    Option,
    Problem,
    problem,
)
from hetjax.planner.model.request import PlanRequest, may_offload
from hetjax.planner.model.terms.memory_terms import (
    KeptBytes,
    activation_bytes_BO,
    kept_bytes,
    layer_kinds,
    node_of,
    precision_of,
    static_bytes_OK,
    updating_bytes_OU,
)
from hetjax.planner.model.terms.time_terms import (
    option_halves_s,
    option_least_update_s,
    option_program_s,
    option_times,
)

# limits on launch-ahead in the search problem, for small and for large clusters
_MOST_IN_FLIGHT, _MOST_OF_LARGE = 16, 64


def options_of(request: PlanRequest, degrees: Sequence[int]) -> tuple[Option, ...]:
    """Return every way to run a stage with one of these tensor degrees."""
    return tuple(
        Option(device_class=c, tensor=tensor, data=data, remat=remat, offload=offload)
        for c, nodes in enumerate(request.classes)
        for tensor, data in product(degrees, sorted(set(request.data_degrees)))
        if tensor * data <= nodes.devices_per_node
        and any(size % data == 0 for size in request.microbatch_sizes)
        for remat, offload in product(request.remats, request.offloads)
        if may_offload(offload, nodes.nodes[0])
    )


def search_problem(
    request: PlanRequest,
    degrees: Sequence[int],
    *,
    num_replicas: float = inf,
    holders: Holders = "any",
    packing: bool = True,
    tight: bool = False,
) -> Problem:
    """Return the problem to search by, with these tensor degrees.

    Gradient sums are priced for `num_replicas` replicas and these `holders` of layers
    (`hops.py`). The part that earlier stages do not hide is added to the step. If
    `num_replicas` is 1, plans have one replica. Otherwise stages have room to pack
    gradients, unless `packing` is off.
    Programs of several layers need more memory than those of one. How much is known
    only roughly, and `tight` leaves it out, so that nothing that fits is missed.
    Raises BadInput if no device has times at any of the microbatch sizes.
    """
    options = options_of(request, degrees)
    facts, num_sizes = _facts(request, options), len(request.microbatch_sizes)
    packing = packing and num_replicas > 1 and not tight
    rates_O = sync_bytes_per_s(request, options, holders)
    times = 2 * (1 - 1 / num_replicas)
    terms = _costs(
        request,
        options,
        facts,
        update_s_BOK=facts.update_s_BOK,
        static_bytes_BOK=facts.static_bytes_OK
        + (facts.extra_of_one_bytes_BOK if tight else facts.extra_bytes_BOK),
        spared_bytes_BOK=None if tight else facts.spared_bytes_BOK,
        saved_bytes_BOK=facts.saved_bytes_BOK,
        memory_bytes_BO=facts.memory_bytes_O
        - (facts.shared_of_one_bytes_BO if tight else facts.shared_bytes_BO),
        message_bytes_BO=facts.activation_bytes_BO,
        # a ring of R replicas carries 2 (R - 1) / R of the bytes
        sync_s=lambda o, size_bytes: times * size_bytes / rates_O[o],
        sync_exposed="drained",
        drain_s_BOK=facts.drain_s_BOK,
        packed_bytes_OK=_packed_bytes(options, facts) if packing else None,
        device_bytes_O=facts.memory_bytes_O,
        updated_bytes=lambda counts_KU: (
            facts.static_bytes_OK @ counts_KU
            + updating_bytes_OU(
                request, options, facts.firsts, counts_KU, packed=packing, surely=tight
            )
        ),
        stage_s_BO=np.tile(2 * facts.program_s_O, (num_sizes, 1)),
    )
    return _problem(
        request,
        options,
        terms,
        max_launch_ahead=_MOST_OF_LARGE if request.is_large else _MOST_IN_FLIGHT,
        one_replica=num_replicas == 1,
    )


def bound_problem(
    request: PlanRequest,
    degrees: Sequence[int],
    *,
    num_replicas: Literal["any", "one", "several"] = "any",
    busy_s_BOK: Floats | None = None,
    parts: int = 1,
) -> Problem:
    """Return the problem to bound by, with these tensor degrees.

    No plan with these options and so many replicas simulates faster than the problem's
    bound in the prefix form. For `busy_s_BOK` (other seconds of a microbatch) and
    `parts` (of each microbatch) see `split_terms.py`.
    """
    options = options_of(request, degrees)
    facts, num_sizes = _facts(request, options), len(request.microbatch_sizes)
    program_s_O, rates_O = facts.program_s_O, np.full(len(options), inf)
    if num_replicas == "several":
        rates_O = most_sum_bytes_per_s(request, options)
    if busy_s_BOK is not None:
        facts = replace(facts, busy_s_BOK=busy_s_BOK / parts)
        program_s_O = program_s_O / parts
    own_bytes_OK = facts.own_bytes_OK - SCALAR_BYTES  # every layer includes a stage's
    terms = _costs(
        request,
        options,
        facts,
        update_s_BOK=facts.least_update_s_BOK,
        static_bytes_BOK=np.tile(own_bytes_OK, (num_sizes, 1, 1)),
        device_bytes_O=facts.memory_bytes_O,
        updated_bytes=lambda counts_KU: (
            own_bytes_OK @ counts_KU
            + updating_bytes_OU(
                request, options, facts.firsts, counts_KU, packed=False, surely=True
            )
        ),
        saved_bytes_BOK=facts.least_saved_bytes_BOK,
        memory_bytes_BO=np.tile(facts.memory_bytes_O, (num_sizes, 1)),
        sync_s=lambda o, size_bytes: size_bytes / rates_O[o],
        sync_exposed="first",
        stage_s_BO=np.tile(program_s_O, (num_sizes, 1)),
    )
    if busy_s_BOK is not None:
        assert terms.hop_s_BKOO is not None and terms.link_s_BKOO is not None
        halved, shared = terms.hop_s_BKOO / 2, terms.link_s_BKOO / parts
        terms = replace(terms, hop_s_BKOO=halved, link_s_BKOO=shared)
    found = _problem(
        request,
        options,
        terms,
        parts=parts,
        max_launch_ahead=len(request.model.layers),
        one_replica=num_replicas == "one",
    )
    fits_BOU = found.most_in_flight_BOU > 0
    return replace(found, most_in_flight_BOU=np.where(fits_BOU, UNLIMITED, 0))


def forward_and_split_s_BOK(
    request: PlanRequest, degrees: Sequence[int]
) -> tuple[Floats, Floats, tuple[int, ...]]:
    """Return the seconds of a forward, the least seconds of a microbatch whether its
    backward pass is whole or split, and the kind of every layer."""
    options, (_, firsts) = options_of(request, degrees), layer_kinds(request)
    facts = _facts(request, options)
    whole_s_BOK = facts.drain_s_BOK
    halves_s_BOK = np.full_like(whole_s_BOK, np.inf)
    for b, o, shares in _cases(request, options):
        for k, layer in enumerate(firsts):
            if not np.isnan(facts.busy_s_BOK[b, o, k]):
                halves_s_BOK[b, o, k] = option_halves_s(
                    request, options[o], layer, shares
                )
    forward_s_BOK = facts.busy_s_BOK - whole_s_BOK
    least_s_BOK = forward_s_BOK + np.minimum(whole_s_BOK, halves_s_BOK)
    return forward_s_BOK, least_s_BOK, facts.kinds


def _costs(
    request: PlanRequest, options: Sequence[Option], facts: "_Facts", **own: Any
) -> LayerCosts:
    """Return the costs that both views share, with `own` costs of one view."""
    hop_s_BKOO, link_s_BKOO = hop_tables(request, options, len(facts.sync_bytes_K))
    return LayerCosts(
        kinds=facts.kinds,
        busy_s_BOK=facts.busy_s_BOK,
        sync_bytes_OK=np.tile(facts.sync_bytes_K, (len(options), 1)),
        hop_s_BKOO=hop_s_BKOO,
        link_s_BKOO=link_s_BKOO,
        **own,
    )


def _problem(
    request: PlanRequest,
    options: Sequence[Option],
    terms: LayerCosts,
    *,
    parts: int = 1,
    max_launch_ahead: int,
    one_replica: bool = False,
) -> Problem:
    return problem(
        terms,
        classes=[
            DeviceClass(
                name=nodes.name,
                num_devices=nodes.num_devices,
                devices_per_node=nodes.devices_per_node,
            )
            for nodes in request.classes
        ],
        options=options,
        microbatch_sizes=request.microbatch_sizes,
        global_batch=request.global_batch * parts,
        max_launch_ahead=max_launch_ahead,
        one_replica=one_replica,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Facts:
    """Costs by kind of layer. `own_bytes_OK` leaves out tied parameters of other
    layers. `shared_bytes_BO` has room for a block's programs in every stage,
    `extra_bytes_BOK` is what a kind's programs need beyond that, `spared_bytes_BOK`
    how much less a stage's only layer of the kind needs. `..._of_one_...` are the same
    for stages with only one layer of each kind."""

    kinds: tuple[int, ...]
    firsts: Sequence[int]  # the first layer of each kind
    program_s_O: Floats
    busy_s_BOK: Floats
    drain_s_BOK: Floats
    update_s_BOK: Floats
    least_update_s_BOK: Floats
    static_bytes_OK: Floats
    own_bytes_OK: Floats
    extra_bytes_BOK: Floats
    extra_of_one_bytes_BOK: Floats
    shared_of_one_bytes_BO: Floats
    spared_bytes_BOK: Floats
    saved_bytes_BOK: Floats
    least_saved_bytes_BOK: Floats
    shared_bytes_BO: Floats
    activation_bytes_BO: Floats
    memory_bytes_O: Floats
    sync_bytes_K: Floats


def _facts(request: PlanRequest, options: Sequence[Option]) -> _Facts:
    kinds, firsts = layer_kinds(request)
    dims = len(request.microbatch_sizes), len(options), len(firsts)
    busy, drain, update, least_update = np.full((4, *dims), np.nan)
    saved, least, once, each, workspace, spared = np.zeros((6, *dims))
    problems: list[BadInput] = []
    kept_by: dict[tuple[object, ...], KeptBytes] = {}
    for b, o, shares in _cases(request, options):
        check_stopped()  # tracing layers can take many seconds
        for k, layer in enumerate(firsts):
            try:
                times = option_times(request, options[o], layer, shares)
            except BadInput as error:  # the profile has no times for this option
                problems.append(error)
                continue
            busy[b, o, k], update[b, o, k] = times.busy_s, times.update_s
            drain[b, o, k] = times.backward_s
            least_update[b, o, k] = option_least_update_s(
                request, options[o], layer, shares
            )
            compiler = compiler_of(node_of(request, options[o]).device)
            alike = layer, shares, options[o].data, options[o].remat, compiler
            if alike not in kept_by:
                kept_by[alike] = kept_bytes(request, options[o], layer, shares)
            kept = kept_by[alike]
            saved[b, o, k] = kept.saved_bytes
            least[b, o, k] = kept.least_saved_bytes
            once[b, o, k] = kept.stack_saved_bytes
            each[b, o, k] = kept.workspace_bytes
            workspace[b, o, k] = kept.stack_workspace_bytes
            spared[b, o, k] = kept.spared_workspace_bytes
    if np.isnan(busy).any(axis=2).all() and problems:
        raise problems[0]
    update, drain, least_update = map(np.nan_to_num, (update, drain, least_update))
    inner = [k for k, at in enumerate(firsts) if 0 < at < len(request.model.layers) - 1]
    block = workspace[:, :, inner].max(axis=2, initial=0)
    alone = each + workspace - spared
    block_alone = alone[:, :, inner].max(axis=2, initial=0)
    activation = activation_bytes_BO(request, options)
    room = [node_plan_bytes(node_of(request, o)) for o in options]
    return _Facts(
        kinds=kinds,
        firsts=firsts,
        program_s_O=np.array([option_program_s(request, o) for o in options]),
        busy_s_BOK=busy,
        drain_s_BOK=drain,
        update_s_BOK=update,
        least_update_s_BOK=least_update,
        static_bytes_OK=static_bytes_OK(request, options, firsts, borrowed=True),
        own_bytes_OK=static_bytes_OK(request, options, firsts, borrowed=False),
        extra_bytes_BOK=each + np.maximum(workspace - block[:, :, None], 0),
        extra_of_one_bytes_BOK=np.maximum(alone - block_alone[:, :, None], 0),
        shared_of_one_bytes_BO=block_alone + 4 * activation,
        spared_bytes_BOK=spared,
        saved_bytes_BOK=saved,
        least_saved_bytes_BOK=least,
        # plus a message just received, one just produced, and their shards
        shared_bytes_BO=block + 4 * activation,
        activation_bytes_BO=activation + np.maximum(once, 0).sum(axis=2),
        memory_bytes_O=np.array(room),
        sync_bytes_K=GRADIENT_BYTES
        * np.array(
            [
                float(parameter_count(request.model.layers[k], trained=True))
                for k in firsts
            ]
        ),
    )


def _packed_bytes(options: Sequence[Option], facts: _Facts) -> Floats:
    """Return what a stage holds while its gradients are packed as one group.

    The largest possible group has all the stage's layers.
    """
    ways_O1 = np.array([[(1 / o.data + 1) / o.tensor] for o in options])
    return facts.static_bytes_OK + ways_O1 * facts.sync_bytes_K


def _cases(
    request: PlanRequest, options: Sequence[Option]
) -> Iterator[tuple[int, int, Shares]]:
    """Yield microbatch sizes and options (by index), with a device's `Shares`."""
    for (b, size), (o, option) in product(
        enumerate(request.microbatch_sizes), enumerate(options)
    ):
        if size % option.data == 0 and size <= request.global_batch:
            shares = Shares(
                num_sequences=size // option.data,
                seq_len=request.seq_len,
                hidden_size=hidden_size(request.model),
                dtype=precision_of(request, option),
                tensor=option.tensor,
                attention=request.attentions[node_of(request, option).name],
                packed=request.packed,
            )
            yield b, o, shares
