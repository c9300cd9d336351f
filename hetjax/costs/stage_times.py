# SPDX-License-Identifier: Apache-2.0
"""Computes the seconds of a stage, and of a single layer, measured or estimated.

Owns two rules: a stage's seconds are the sum over its layers, and a profile takes
precedence over estimates for its devices. A step's exchange over the data axis counts
as part of the update, as no computation hides it. Does not own the estimates
(`roofline.py`) nor the profile (`measured/layer_profile.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import fsum

from hetjax.cluster.catalogue import DeviceSpec, Precision, device_spec
from hetjax.cluster.cluster import Node
from hetjax.costs.costs import StageKey, StageTimes
from hetjax.costs.graph.passes import Shares, passes, split_passes
from hetjax.costs.layer_bytes import layer_stacks
from hetjax.costs.measured.layer_profile import (
    Measurement,
    Profile,
    measured,
    profile_with,
)
from hetjax.costs.network.routes import ring_card_bytes_per_s
from hetjax.costs.roofline import (
    Hop,
    calibration,
    data_sync_s,
    half_times,
    host_update_s,
    pass_times,
    ring_hop,
    update_s,
)
from hetjax.costs.stage_memory import (
    SCALAR_BYTES,
    StaticBytes,
    gradient_bytes,
    stage_shares,
    static_bytes,
)
from hetjax.models.model import Model
from hetjax.plans.plan import Offload, Plan, Remat, Stage, segments, segments_of
from hetjax.stage.arrays import OptimizerInit
from hetjax.stage.partition import BlockStack, StageStacks, stage_stacks

# dtype of compute, the optimizer, and the place of its state
_Way = tuple[Precision, OptimizerInit, Offload]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTimes:
    """Seconds of one layer alone: both passes of a microbatch, the backward pass alone,
    and an update."""

    busy_s: float
    backward_s: float
    update_s: float


def layer_times(
    model: Model,
    layer: int,
    stage: Stage,
    node: Node,
    shares: Shares,
    *,
    tensor_card_bytes_per_s: float,
    optimizer: OptimizerInit,
    profile: Profile | None = None,
) -> LayerTimes:
    """Return the seconds that a layer adds to a stage on a node that runs as `stage`.

    Each of its tensor groups gets `tensor_card_bytes_per_s` of a network card
    (`network/routes.py`). The fixed time of a program is not included
    (`Profile.program_s`). A measured update is that of a layer in several replicas, if
    the profile has it.
    """
    held = layer_stacks(model, layer)
    way: _Way = shares.dtype, optimizer, stage.offload
    sync_s = _data_sync_s(held.stacks, stage, node, way)
    if known := profile_with(profile, node.device):
        m = _measured(known, stage, layer, node, shares.num_sequences)
        return LayerTimes(
            busy_s=m.forward_s + m.backward_s,
            backward_s=m.backward_s,
            update_s=sync_s
            + (
                _update_s(m, shared=True)
                if stage.offload == "none"
                else _stage_update_s(held.stacks, stage, node, way)
            ),
        )
    device = device_spec(node)
    hop = ring_hop(device, tensor_card_bytes_per_s)
    forward_s, backward_s = _layer_times(held, shares, stage.remat, device, hop)
    return LayerTimes(
        busy_s=forward_s + backward_s,
        backward_s=backward_s,
        update_s=_stage_update_s(held.stacks, stage, node, way) + sync_s,
    )


def least_update_s(
    model: Model,
    layer: int,
    stage: Stage,
    node: Node,
    shares: Shares,
    *,
    optimizer: OptimizerInit,
    profile: Profile | None = None,
) -> float:
    """Return a lower bound of what a layer adds to the update of any stage that runs as
    `stage`, whether several replicas hold the layer or not.

    The bound leaves out the fixed time of an update, tied elements of other layers, and
    the data axis.
    """
    device = device_spec(node)
    known = profile_with(profile, node.device)
    if known and stage.offload == "none":
        m = _measured(known, stage, layer, node, shares.num_sequences)
        return min(m.update_s, _update_s(m, shared=True))
    stacks = [s for s in layer_stacks(model, layer).stacks if s.only is None]
    if not stacks:
        return 0.0
    held = static_bytes(stacks, stage.mesh, shares.dtype, optimizer, stage.offload)
    held = replace(held, accumulators=held.accumulators - SCALAR_BYTES)
    whole_s = _held_update_s(held, stage, node)
    return max(whole_s - calibration(device).launch_s, 0.0)


def layer_halves_s(
    model: Model,
    layer: int,
    stage: Stage,
    node: Node,
    shares: Shares,
    *,
    tensor_card_bytes_per_s: float,
    profile: Profile | None = None,
) -> float:
    """Return the seconds of a layer's split backward, I plus W; see `layer_times`."""
    if known := profile_with(profile, node.device):
        m = _measured(known, stage, layer, node, shares.num_sequences)
        return _half(m, m.input_gradient_s) + _half(m, m.weight_gradient_s)
    device = device_spec(node)
    hop = ring_hop(device, tensor_card_bytes_per_s)
    held = layer_stacks(model, layer)
    return sum(_layer_halves(held, shares, stage.remat, device, hop))


def stage_times(
    plan: Plan,
    model: Model,
    key: StageKey,
    node: Node,
    *,
    dtype: Precision,
    optimizer: OptimizerInit,
    profile: Profile | None = None,
    halves: bool = True,
) -> StageTimes:
    """Return the stage's seconds by action: the sum over its layers.

    They come from the profile if it has the node's device, else from estimates. A
    profile measures tensor groups inside a host; its times are also used for groups
    over several hosts. Without `halves`, I and W are neither traced nor estimated.
    """
    replica = plan.replicas[key[0]]
    stage = replica.stages[key[1]]
    way: _Way = dtype, optimizer, stage.offload
    stacks = stage_stacks(model, segments_of(stage, segments(plan))).stacks
    sync_s = _data_sync_s(stacks, stage, node, way)
    if known := profile_with(profile, node.device):
        times = profiled_times(
            known,
            stage,
            node=node,
            microbatch_size=replica.microbatch_size,
            shared=len(plan.replicas) > 1,
        )
        if stage.offload != "none":  # profiles do not measure it
            on_host_s = _stage_update_s(stacks, stage, node, way)
            times = replace(times, update_s=on_host_s)
        times = replace(times, update_s=times.update_s + sync_s)
        without = dict(input_gradient_s=None, weight_gradient_s=None)
        return times if halves else replace(times, **without)
    device = device_spec(node)
    shares = stage_shares(plan, model, replica, stage, dtype)
    hop = ring_hop(device, ring_card_bytes_per_s(node, _tensor_rings(stage)))
    layers = [layer_stacks(model, layer) for layer in range(*stage.layers)]
    ways = [(layer, shares, stage.remat, device, hop) for layer in layers]
    seconds = [_layer_times(*way) for way in ways]
    forward_s, backward_s = (sum(column) for column in zip(*seconds, strict=True))
    times = StageTimes(
        forward_s=forward_s,
        backward_s=backward_s,
        fused_s=forward_s + backward_s,
        update_s=_stage_update_s(stacks, stage, node, way) + sync_s,
    )
    if not halves:
        return times
    seconds = [_layer_halves(*way) for way in ways]
    input_s, weight_s = (sum(column) for column in zip(*seconds, strict=True))
    return replace(times, input_gradient_s=input_s, weight_gradient_s=weight_s)


def profiled_times(
    profile: Profile,
    stage: Stage,
    *,
    node: Node,
    microbatch_size: int,
    shared: bool = False,
) -> StageTimes:
    """Return the stage's seconds by action: the sum over its layers, plus one program.

    `microbatch_size` is the replica's, before the split over `data`. A backward whose
    halves were not measured is divided equally. Layers are `shared` if several replicas
    hold them: other programs then update them.
    """
    layers = _measured_layers(profile, stage, node, microbatch_size)

    def program_s(seconds: Iterable[float]) -> float:
        return fsum(seconds) + profile.program_s / node.speeds.layers

    return StageTimes(
        forward_s=program_s(m.forward_s for m in layers),
        backward_s=program_s(m.backward_s for m in layers),
        fused_s=program_s(m.forward_s + m.backward_s for m in layers),
        input_gradient_s=program_s(_half(m, m.input_gradient_s) for m in layers),
        weight_gradient_s=program_s(_half(m, m.weight_gradient_s) for m in layers),
        update_s=program_s(_update_s(m, shared) for m in layers),
    )


def has_halves(
    profile: Profile, stage: Stage, *, node: Node, microbatch_size: int
) -> bool:
    """Return whether the profile has both backward halves of all the stage's layers."""
    layers = _measured_layers(profile, stage, node, microbatch_size)
    return all(m.input_gradient_s is not None for m in layers)


def _measured_layers(
    profile: Profile, stage: Stage, node: Node, microbatch_size: int
) -> list[Measurement]:
    size = microbatch_size // stage.mesh.data
    return [_measured(profile, stage, n, node, size) for n in range(*stage.layers)]


def _measured(
    profile: Profile, stage: Stage, layer: int, node: Node, microbatch_size: int
) -> Measurement:
    found = measured(
        profile,
        device=node.device,
        kind=profile.layers[layer],
        tensor=stage.mesh.tensor,
        data=stage.mesh.data,
        microbatch_size=microbatch_size,
        remat=stage.remat,
    )
    return found.at_speed(node.speeds.layers)


def _update_s(layer: Measurement, shared: bool) -> float:
    if shared and layer.shared_update_s is not None:
        return layer.shared_update_s
    return layer.update_s


def _half(layer: Measurement, seconds: float | None) -> float:
    return layer.backward_s / 2 if seconds is None else seconds


@lru_cache(maxsize=4096)
def _layer_times(
    held: StageStacks, shares: Shares, remat: Remat, device: DeviceSpec, hop: Hop
) -> tuple[float, float]:
    return pass_times(passes(held, shares, remat), device, shares.dtype, hop)


@lru_cache(maxsize=4096)
def _layer_halves(
    held: StageStacks, shares: Shares, remat: Remat, device: DeviceSpec, hop: Hop
) -> tuple[float, float]:
    return half_times(split_passes(held, shares, remat), device, shares.dtype, hop)


def _stage_update_s(
    stacks: tuple[BlockStack, ...], stage: Stage, node: Node, way: _Way
) -> float:
    return _held_update_s(static_bytes(stacks, stage.mesh, *way), stage, node)


def _held_update_s(held: StaticBytes, stage: Stage, node: Node) -> float:
    """Estimate an update on the device or on the host, depending on the stage."""
    device = device_spec(node)
    if stage.offload == "none":
        return update_s(held, device)
    return host_update_s(held, stage.mesh, device, node.devices_per_host)


def _data_sync_s(
    stacks: tuple[BlockStack, ...], stage: Stage, node: Node, way: _Way
) -> float:
    data = stage.mesh.data
    if data == 1:
        return 0.0
    held = static_bytes(stacks, stage.mesh, *way)
    hop = ring_hop(device_spec(node), ring_card_bytes_per_s(node, _data_rings(stage)))
    return data_sync_s(held, gradient_bytes(stacks, stage.mesh), data, hop)


def _tensor_rings(stage: Stage) -> list[tuple[int, ...]]:
    tensor = stage.mesh.tensor
    starts = range(0, len(stage.devices), tensor)
    return [stage.devices[start : start + tensor] for start in starts]


def _data_rings(stage: Stage) -> list[tuple[int, ...]]:
    tensor = stage.mesh.tensor
    return [stage.devices[rank::tensor] for rank in range(tensor)]
