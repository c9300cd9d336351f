# SPDX-License-Identifier: Apache-2.0
"""Computes the bytes that a stage of a plan needs on each of its devices.

Owns the sizes of a stage's buffers, equal to those of its compiled programs to the
byte, and the estimate of the programs' workspace. Does not own which buffers are live
at once (`schedule/`) nor the memory of a device (`cluster/`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from hetjax.cluster.catalogue import Compiler, Precision
from hetjax.costs.costs import StageKey, StageMemory
from hetjax.costs.graph.fusion import identities
from hetjax.costs.graph.passes import Passes, Shares, passes, split_passes
from hetjax.costs.measured.compiled import NOT_COMPILED, CompiledStage
from hetjax.costs.workspace import saved_bytes, workspace_bytes
from hetjax.mesh.axes import abstract_mesh
from hetjax.models.model import Model, abstract_params, apply
from hetjax.plans.plan import (
    Offload,
    Plan,
    Remat,
    Replica,
    Stage,
    StageMesh,
    segments,
    segments_of,
)
from hetjax.stage.arrays import (
    OptimizerInit,
    accumulators,
    compute_weights,
    copied_weights,
    device_bytes,
    frozen_part,
    master_weights,
    optimizer_state,
    trained_part,
)
from hetjax.stage.partition import (
    BlockStack,
    StageStacks,
    stage_parameters,
    stage_stacks,
)

SCALAR_BYTES = 4 + 1  # of a stage: its loss, and whether its masters are finite


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticBytes:
    """Bytes on each device of the stage.

    `copies` are compute weights that are not the masters themselves, `frozen` are
    compute weights without masters. `accumulators` include the loss and the flag
    whether the weights are finite. `on_host` is what the stage keeps on its host
    instead of masters and optimizer state on each device. `largest_master` is the
    masters' largest array, `largest_unit` the largest of one unit of a stack.
    """

    masters: int
    optimizer: int
    copies: int
    frozen: int
    accumulators: int
    on_host: int = 0
    largest_master: int = 0
    largest_unit: int = 0

    @property
    def total(self) -> int:
        kept = self.masters + self.optimizer + self.copies + self.frozen
        return kept + self.accumulators


def adam_state(params: dict[str, Any]) -> Any:
    """Return the state of Adam: two moments of every parameter, and a count."""
    return {"count": jnp.zeros((), jnp.int32), "mu": params, "nu": params}


def static_bytes(
    stacks: Sequence[BlockStack],
    mesh: StageMesh,
    dtype: Precision,
    optimizer: OptimizerInit,
    offload: Offload = "none",
) -> StaticBytes:
    """Sum up what the stage holds from the first action of a step to the last."""
    held = [
        (
            stack.num_units,
            _unit_bytes(replace(stack, num_units=1), mesh, dtype, optimizer, offload),
        )
        for stack in stacks
    ]
    scalars = SCALAR_BYTES - (offload != "none")  # masters are then on the host
    return StaticBytes(
        masters=sum(units * one.masters for units, one in held),
        optimizer=sum(units * one.optimizer for units, one in held),
        copies=sum(units * one.copies for units, one in held),
        frozen=sum(units * one.frozen for units, one in held),
        accumulators=sum(units * one.accumulators for units, one in held) + scalars,
        on_host=sum(units * one.on_host for units, one in held),
        largest_master=max(units * one.largest_unit for units, one in held),
        largest_unit=max(one.largest_unit for _, one in held),
    )


def gradient_bytes(stacks: Sequence[BlockStack], mesh: StageMesh) -> int:
    """Return the fp32 bytes of gradients on a device, sharded over tensor only."""
    return sum(_gradient_bytes(stack, mesh) for stack in stacks)


@lru_cache(maxsize=4096)
def _gradient_bytes(stack: BlockStack, mesh: StageMesh) -> int:
    on = abstract_mesh(data=mesh.data, tensor=mesh.tensor)
    weights = compute_weights([stack], on, jnp.float32)
    return device_bytes(trained_part([stack], weights))


@lru_cache(maxsize=4096)
def _unit_bytes(
    unit: BlockStack,
    mesh: StageMesh,
    dtype: Precision,
    optimizer: OptimizerInit,
    offload: Offload,
) -> StaticBytes:
    on = abstract_mesh(data=mesh.data, tensor=mesh.tensor)
    weights, masters = compute_weights([unit], on, dtype), master_weights([unit], on)
    trained = trained_part([unit], weights)
    if offload == "optimizer":
        whole = master_weights([unit], abstract_mesh(data=1, tensor=1))
        state = optimizer_state([unit], whole, optimizer)
        return StaticBytes(
            masters=0,
            optimizer=0,
            copies=device_bytes(trained),
            frozen=device_bytes(frozen_part([unit], weights)),
            accumulators=device_bytes(accumulators(trained)),
            on_host=device_bytes((whole, state)),
        )
    return StaticBytes(
        masters=device_bytes(masters),
        optimizer=device_bytes(optimizer_state([unit], masters, optimizer)),
        copies=device_bytes(copied_weights(trained, masters)),
        frozen=device_bytes(frozen_part([unit], weights)),
        accumulators=device_bytes(accumulators(trained)),
        largest_unit=max(map(device_bytes, jax.tree.leaves(masters)), default=0),
    )


def stage_memory(
    plan: Plan,
    model: Model,
    key: StageKey,
    *,
    dtype: Precision = "float32",
    optimizer: OptimizerInit = adam_state,
    halves: bool = True,
    split: bool = False,
    compiler: Compiler = "cpu",
    compiled: CompiledStage = NOT_COMPILED,
) -> StageMemory:
    """Estimate the memory of one stage of the plan if `compiler` makes its programs.

    `dtype` is that of compute; `optimizer` makes the optimizer's state. The saved bytes
    include the stage's input, which the residuals keep alive. Without `halves` the call
    skips the tracing of I and W, and counts nothing between them.
    The workspace is that of F and B, or FB on the last stage, and enough for F, I and
    W; with `split` it is that of F, I and W alone. Figures in `compiled` replace
    estimates.
    """
    replica = plan.replicas[key[0]]
    stage = replica.stages[key[1]]
    held = stage_stacks(model, segments_of(stage, segments(plan)))
    shares = stage_shares(plan, model, replica, stage, dtype)
    way = held, shares, stage.remat, stage.mesh.data
    buffers = _pass_memory(*way, split, compiler)
    # no microbatch is in flight while gradients are packed: its buffers are free
    fused = held.last and not split
    free = buffers.input_bytes if fused else buffers.saved_bytes
    workspace, packing = compiled.workspace_bytes, compiled.packing_bytes
    if workspace is None:
        workspace = buffers.workspace_bytes
    if packing is None:
        packing = _packing_bytes(plan, model, key)
    static = static_bytes(held.stacks, stage.mesh, dtype, optimizer, stage.offload)
    updating = compiled.update_bytes
    if updating is None:
        updating = _updating_bytes(static, _is_packed(plan, stage), compiler)
    return replace(
        buffers,
        static_bytes=static.total,
        half_saved_bytes=half_bytes(*way) if halves else 0,
        workspace_bytes=max(workspace, packing - free - buffers.output_bytes),
        # new copies of weights are made while the old ones still exist
        update_bytes=static.copies + updating,
    )


@lru_cache(maxsize=1024)
def _pass_memory(
    held: StageStacks,
    shares: Shares,
    remat: Remat,
    data: int,
    split: bool,
    compiler: Compiler,
) -> StageMemory:
    """Return the memory of the passes alone, without what lives through the step."""
    traced = passes(held, shares, remat)
    working = split_passes(held, shares, remat) if split else traced
    first, num_given = len(traced.weights), 2 if shares.packed else 1
    given = sum(
        map(traced.cuts.num_bytes, traced.forward.inputs[first : first + num_given])
    )
    output = 0 if held.last else traced.cuts.num_bytes(traced.forward.outputs[0])
    return StageMemory(
        saved_bytes=given + residual_bytes(traced, data),
        input_bytes=given,
        output_bytes=output,
        workspace_bytes=workspace_bytes(working, data, compiler),
    )


@lru_cache(maxsize=1024)
def half_bytes(held: StageStacks, shares: Shares, remat: Remat, data: int) -> int:
    """Return the bytes that live between I and W of one microbatch on a device."""
    traced = split_passes(held, shares, remat)
    saved, weights = identities(traced.saved), identities(traced.weights)
    kept = [value for value in traced.kept if id(value) not in weights]
    return sum(
        saved_bytes(traced, v, data) if id(v) in saved else traced.cuts.num_bytes(v)
        for v in (*kept, *traced.crossing)
    )


def stage_shares(
    plan: Plan, model: Model, replica: Replica, stage: Stage, dtype: Precision
) -> Shares:
    """Return the part of a microbatch that one device of the stage computes."""
    return Shares(
        num_sequences=replica.microbatch_size // stage.mesh.data,
        seq_len=plan.seq_len,
        hidden_size=hidden_size(model),
        dtype=dtype,
        tensor=stage.mesh.tensor,
        attention=stage.attention,
        packed=plan.packed,
    )


@lru_cache(maxsize=64)
def hidden_size(model: Model) -> int:
    """Return the width of the residual stream."""
    spec = model.modules[0]
    params = {
        name: jax.ShapeDtypeStruct(param.shape, param.held_in(jnp.float32))
        for name, param in abstract_params(spec).items()
    }
    tokens_BL = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(lambda p, t: apply(spec, p, t)[0], params, tokens_BL).shape[2]


def residual_bytes(traced: Passes, data: int) -> int:
    """Return the bytes of one microbatch's residuals on a device.

    Residuals that do not depend on the batch (masks, RoPE tables, scales) are stacked
    over the data ranks, and every device holds the whole stack.
    """
    return sum(saved_bytes(traced, value, data) for value in traced.saved)


def _is_packed(plan: Plan, stage: Stage) -> bool:
    """Return whether gradients are summed as packed rows."""
    return len(plan.replicas) > 1 or stage.mesh.data > 1


def _updating_bytes(static: StaticBytes, packed: bool, compiler: Compiler) -> int:
    """Return the update's workspace: a leaf's gradient, if it is unpacked from rows,
    plus one unit's scaled gradient and as much again that a compiler stores.

    Read off programs for GPUs. XLA for CPUs may store the scaled gradient of a whole
    leaf (in JAX 0.12, not in 0.10), and with data ranks all gradients at once.
    """
    scaled = 2 * static.largest_unit
    if compiler == "cpu":
        scaled = max(scaled, static.largest_master)
    return packed * static.largest_master + scaled


def _packing_bytes(plan: Plan, model: Model, key: StageKey) -> int:
    """Return the bytes of the largest gradient group's rows and of their sources."""
    stage = plan.replicas[key[0]].stages[key[1]]
    if not _is_packed(plan, stage):
        return 0
    num_devices = [len(stage.devices) for _, _, stage in plan.stages()]
    rows = math.lcm(*num_devices) if len(plan.replicas) > 1 else len(stage.devices)
    cutting = 1.0 if rows == len(stage.devices) else 1.45  # measured: 0.8-1.0, 1.43
    largest = max(_group_bytes(plan, model, stage), default=0)
    return round(largest * (1 / stage.mesh.data + cutting))


def _group_bytes(plan: Plan, model: Model, stage: Stage) -> Iterator[int]:
    """Yield the fp32 bytes of the stage's gradient groups."""
    held = stage_parameters(model, segments_of(stage, segments(plan)))
    for leaf_ids in held.groups.values():
        yield sum(
            gradient_bytes([replace(held.kind.stacks[at], only=leaf)], stage.mesh)
            for at, leaf in leaf_ids
        )
