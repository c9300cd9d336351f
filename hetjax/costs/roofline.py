# SPDX-License-Identifier: Apache-2.0
"""Estimates the seconds of passes and updates on devices without measurements.

Every kernel takes the longer of its arithmetic and its memory traffic, plus its launch
time. All-reduces over the tensor axis, and an update's collectives over the data axis,
are rings whose times are added. Owns this model and its constants. Does not own the
kernels (`graph/traffic.py`), the figures of a device (the catalogue) nor measured times
(`measured/layer_profile.py`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hetjax.cluster.catalogue import DeviceSpec, Precision, native_precisions
from hetjax.cluster.speeds import AS_MODELLED
from hetjax.costs.graph.all_reduces import all_reduces
from hetjax.costs.graph.joins import ATTENTION, RAGGED, ragged_sizes
from hetjax.costs.graph.passes import Passes, SplitPasses
from hetjax.costs.graph.traffic import moving_kernels
from hetjax.costs.graph.values import Cuts, Graph, Operation
from hetjax.costs.measured.layer_profile import DTYPES
from hetjax.costs.network.routes import NETWORK_LATENCY_S
from hetjax.costs.stage_memory import StaticBytes
from hetjax.models.attention.kernel_attention import BACKWARD, FORWARD
from hetjax.plans.plan import StageMesh

# Products of an attention kernel. Forward: scores and output. Backward: the scores
# again, and the gradients of probabilities, queries, keys and values.
_PRODUCTS = {FORWARD: 2, BACKWARD: 5}
# The usable part of the 15.8 GB/s one way of PCIe 3.0 x16, which most cards have at
# least; and the rate of AdamW compiled for a host, with 36 bytes per parameter: 15 GB/s
# on two cores
_HOST_LINK_BYTES_PER_S, _HOST_BYTES_PER_S = 12e9, 15e9
_BLOCK = 128  # positions that a kernel computes or skips together


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The share of its catalogue figures that a kind of device reaches.

    `matmul_efficiency` is the share of the peak that the largest products reach.
    `half_size` is the number of rows, columns or depth at which a product reaches half
    of that on one device (partly filled tiles and pipelines). `memory_efficiency` and
    `link_efficiency` are the shares of the two bandwidths that plain kernels and
    all-reduce rings reach. `launch_s` is the time of an empty kernel, `latency_s` that
    of a ring's hop. An attention kernel reaches `attention_efficiency` of the peak for
    infinite lengths and heads. A length of `attention_half_length` positions halves
    that, and so does a head size of `attention_half_head`.
    """

    matmul_efficiency: float = 0.80
    half_size: float = 64.0
    memory_efficiency: float = 0.80
    link_efficiency: float = 0.50
    launch_s: float = 4e-6
    latency_s: float = 5e-6
    attention_efficiency: float = 0.80
    attention_half_length: float = 128.0
    attention_half_head: float = 64.0


# Matmul: best measured bf16 products over the peak (Maximum Achievable Matmul FLOPS):
# A100-SXM 271 of 312, A100-PCIe 253, GH200 829 of 989, B200 1745 of 2250. Memory:
# STREAM-like copies reach 0.8 to 0.9 of HBM. Links: all-reduce bus bandwidth of 8 A100
# on NVLink 154 of 300 GB/s. The constants of Hopper were fitted to an H200
# (`experiments/results/gpu/`), which has the same chip as the H100: products compiled
# by XLA reach 694 TFLOP/s, the best of cuBLAS 794.
_HOPPER = Calibration(
    matmul_efficiency=0.745,
    half_size=112.0,
    memory_efficiency=0.83,
    launch_s=1.5e-6,
    attention_efficiency=0.745,
    attention_half_length=1250.0,
    attention_half_head=42.0,
)
CALIBRATIONS = {
    "A100": Calibration(matmul_efficiency=0.87, attention_efficiency=0.87),
    "H100": _HOPPER,
    "H200": _HOPPER,
    "GH200": Calibration(matmul_efficiency=0.84, attention_efficiency=0.84),
    "B200": Calibration(matmul_efficiency=0.78, attention_efficiency=0.78),
    "cpu": Calibration(launch_s=2e-6, half_size=8.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Hop:
    """The slowest step of a ring from one device to the next."""

    bytes_per_s: float
    latency_s: float


def ring_hop(device: DeviceSpec, card_bytes_per_s: float = math.inf) -> Hop:
    """Return a ring's slowest hop: between devices of a host, or over its network card.

    `card_bytes_per_s` is the result of `ring_card_bytes_per_s` (`network/routes.py`).
    """
    constants = calibration(device)
    inside = device.intra_node_gb_per_s * 1e9 * constants.link_efficiency
    stays = math.isinf(card_bytes_per_s)
    return Hop(
        bytes_per_s=min(inside, card_bytes_per_s),
        latency_s=constants.latency_s if stays else NETWORK_LATENCY_S,
    )


def calibration(device: DeviceSpec) -> Calibration:
    """Return the constants of the device's kind, found by its name, at its speeds."""
    known = [kind for kind in CALIBRATIONS if device.name.startswith(kind)]
    found = CALIBRATIONS[max(known, key=len)] if known else Calibration()
    speeds = device.speeds
    if speeds == AS_MODELLED:
        return found
    return replace(
        found,
        matmul_efficiency=found.matmul_efficiency * speeds.products,
        attention_efficiency=found.attention_efficiency * speeds.attention,
        memory_efficiency=found.memory_efficiency * speeds.memory,
        launch_s=found.launch_s / speeds.launches,
    )


def pass_times(
    passes: Passes, device: DeviceSpec, precision: Precision, hop: Hop
) -> tuple[float, float]:
    """Estimate the seconds of F and B of one microbatch, with gradient accumulation.

    `precision` is that of compute; `hop` belongs to the rings over the tensor axis.
    """
    backward_s = graph_s(passes.backward, passes.cuts, device, precision, hop)
    forward_s = graph_s(passes.forward, passes.cuts, device, precision, hop)
    return forward_s, backward_s + _accumulate_s(passes, device)


def half_times(
    passes: SplitPasses, device: DeviceSpec, precision: Precision, hop: Hop
) -> tuple[float, float]:
    """Estimate the seconds of I and of W; W adds gradients to fp32 sums."""
    input_s = graph_s(passes.input_gradient, passes.cuts, device, precision, hop)
    weight_s = graph_s(passes.weight_gradient, passes.cuts, device, precision, hop)
    return input_s, weight_s + _accumulate_s(passes, device)


def _accumulate_s(passes: Passes | SplitPasses, device: DeviceSpec) -> float:
    return sum(
        passes.cuts.num_bytes(v) * (1 + 8 / v.dtype.itemsize) / _bytes_per_s(device)
        for v in passes.trained
    )


def update_s(held: StaticBytes, device: DeviceSpec) -> float:
    """Estimate the seconds of an update, and of the norm before it.

    They read and write masters and state, read gradients twice, and write copies.
    """
    traffic = 2 * (held.masters + held.optimizer + held.accumulators) + held.copies
    return traffic / _bytes_per_s(device) + calibration(device).launch_s


def host_update_s(
    held: StaticBytes, mesh: StageMesh, device: DeviceSpec, per_host: int
) -> float:
    """Estimate the seconds of an update on the host, and of the norm before it.

    Gradients of a device go to the host over its link, and compute copies come back.
    The host reads and writes masters and state, reads gradients, and does as much for
    each of its `per_host` devices. These times add up: only different stacks overlap.
    """
    link = host_link_bytes_per_s(device)
    gradients, num_devices = held.accumulators / mesh.data, mesh.data * mesh.tensor
    traffic = 2 * held.on_host + gradients * num_devices
    return (
        2 * held.accumulators / _bytes_per_s(device)
        + (gradients + held.copies) / link
        + traffic / num_devices * per_host / _HOST_BYTES_PER_S
        + calibration(device).launch_s
    )


def host_link_bytes_per_s(device: DeviceSpec) -> float:
    """Return the assumed rate of the link between a device and its host."""
    return min(_HOST_LINK_BYTES_PER_S, device.intra_node_gb_per_s * 1e9)


def data_sync_s(held: StaticBytes, gradient_bytes: float, data: int, hop: Hop) -> float:
    """Estimate the seconds of the data axis in an update, on one device.

    As programs are compiled today, an all-reduce sums the gradients: 2 (d - 1) / d of
    them leave every device. The compute copies are gathered from the ranks' shares of
    the masters: (d - 1) / d of them leave every device.
    """
    # a host gives each device its copies without a gather
    gathered = 0 if held.on_host else held.copies
    gather_s = ring_s(gathered, data, data - 1, hop)
    return all_reduce_s(gradient_bytes, data, hop) + gather_s


def graph_s(
    graph: Graph, cuts: Cuts, device: DeviceSpec, precision: Precision, hop: Hop
) -> float:
    """Estimate the seconds of a pass, its all-reduces included."""
    busy_s = _kernels_s(graph, cuts, device, precision)
    return busy_s + sum(
        times * all_reduce_s(size, cuts.tensor, hop)
        for size, times in all_reduces(graph, cuts)
    )


def all_reduce_s(num_bytes: float, num_devices: int, hop: Hop) -> float:
    """Estimate a ring's seconds: 2 (n - 1) / n of the bytes leave every device."""
    return ring_s(num_bytes, num_devices, 2 * (num_devices - 1), hop)


def ring_s(num_bytes: float, num_devices: int, num_hops: int, hop: Hop) -> float:
    """Estimate `num_hops` hops of a ring, each with one device's share of the bytes."""
    return num_hops * (num_bytes / num_devices / hop.bytes_per_s + hop.latency_s)


def matmul_s(
    sizes: tuple[int, int, int, int], precision: Precision, device: DeviceSpec
) -> float:
    """Estimate a product of sizes (batch, m, n, k): arithmetic or traffic, the longer.

    `precision` is that of its operands.
    """
    batch, m, n, k = sizes
    traffic = batch * (m * k + k * n + m * n) * DTYPES[precision]
    return max(_arithmetic_s(sizes, precision, device), traffic / _bytes_per_s(device))


def _arithmetic_s(
    sizes: tuple[int, int, int, int], precision: Precision, device: DeviceSpec
) -> float:
    share = product_share(sizes, calibration(device))
    return 2 * math.prod(sizes) / (flops_per_s(device, precision) * share)


def product_share(sizes: tuple[int, int, int, int], constants: Calibration) -> float:
    """Return the share of the peak that a product of sizes (batch, m, n, k) reaches.

    It saturates in every size s as s / (s + half_size).
    """
    return constants.matmul_efficiency * math.prod(
        size / (size + constants.half_size) for size in sizes[1:]
    )


def attention_share(length: int, head_size: int, constants: Calibration) -> float:
    """Return the share of the peak that an attention kernel reaches.

    It saturates in both sizes s as s / (s + half).
    """
    return (
        constants.attention_efficiency
        * (length / (length + constants.attention_half_length))
        * (head_size / (head_size + constants.attention_half_head))
    )


def attention_products(name: str, length: int) -> float:
    """Return how many products over all scores a pass of causal attention amounts to.

    `name` is that of the pass (`kernel_attention.py`). Blocks that no query sees do not
    count.
    """
    blocks = math.ceil(length / _BLOCK)
    return _PRODUCTS[name] * ((blocks + 1) / (2 * blocks))


def _kernels_s(
    graph: Graph, cuts: Cuts, device: DeviceSpec, precision: Precision
) -> float:
    total_s = 0.0
    for kernel in moving_kernels(graph):
        if kernel.step.body is not None:
            steps_s = _kernels_s(kernel.step.body, cuts, device, precision)
            total_s += kernel.step.length * steps_s
        elif kernel.step.op == "dot_general":
            total_s += _product_s(kernel.step, cuts, device, precision)
        elif kernel.step.op == RAGGED:
            total_s += _ragged_s(kernel.step, cuts, device, precision)
        elif kernel.step.op in ATTENTION:
            total_s += _attention_s(kernel.step, cuts, device, precision)
        else:
            size = sum(cuts.num_bytes(v) for v in (*kernel.reads, *kernel.step.outputs))
            total_s += calibration(device).launch_s + size / _bytes_per_s(device)
    return total_s


def _product_s(
    step: Operation, cuts: Cuts, device: DeviceSpec, precision: Precision
) -> float:
    whole = any(v.dtype.itemsize == DTYPES["float32"] for v in step.inputs)
    operands = "float32" if whole else precision
    product_s = matmul_s(_product_sizes(step, cuts), operands, device)
    return calibration(device).launch_s + product_s


def _ragged_s(
    step: Operation, cuts: Cuts, device: DeviceSpec, precision: Precision
) -> float:
    """Estimate all groups' products as one of their total size, or their traffic."""
    shapes = [cuts.shape(value) for value in step.inputs]
    products_s = _arithmetic_s(
        (1, *ragged_sizes(step.params, shapes)), precision, device
    )
    size = sum(cuts.num_bytes(v) for v in (*step.inputs, *step.outputs))
    return calibration(device).launch_s + max(products_s, size / _bytes_per_s(device))


def _attention_s(
    step: Operation, cuts: Cuts, device: DeviceSpec, precision: Precision
) -> float:
    """Estimate a kernel's products over the blocks that some query sees, or its traffic
    without scores, which stay inside the kernel."""
    batch, length, heads, head_size = cuts.shape(step.inputs[0])
    sizes = (batch * heads, length, length, head_size)
    rate = flops_per_s(device, precision) * attention_share(
        length, head_size, calibration(device)
    )
    products_s = attention_products(step.op, length) * 2 * math.prod(sizes) / rate
    size = sum(cuts.num_bytes(v) for v in (*step.inputs, *step.outputs))
    return calibration(device).launch_s + max(products_s, size / _bytes_per_s(device))


def _product_sizes(step: Operation, cuts: Cuts) -> tuple[int, int, int, int]:
    (of_lhs, of_rhs), (batch, rhs_batch) = step.params["dimension_numbers"]
    lhs, rhs = (cuts.shape(v) for v in step.inputs)

    def size(shape: tuple[int, ...], dims: Iterable[int]) -> int:
        return math.prod(shape[dim] for dim in dims)

    free = [dim for dim in range(len(lhs)) if dim not in (*of_lhs, *batch)]
    free_rhs = [dim for dim in range(len(rhs)) if dim not in (*of_rhs, *rhs_batch)]
    return size(lhs, batch), size(lhs, free), size(rhs, free_rhs), size(lhs, of_lhs)


def flops_per_s(device: DeviceSpec, precision: Precision) -> float:
    """Return the matrix peak, if the matrix units multiply this precision.

    Otherwise XLA computes as in fp32. On devices with bf16 the operands are then TF32,
    at half the rate (JAX's default precision). Other devices compute fp32 without
    matrix units: if that rate is unknown, at an eighth of the fp16 peak (V100).
    """
    if precision in native_precisions(device):
        return device.peak_tflops * 1e12
    if device.bf16_native:
        return device.peak_tflops / 2 * 1e12
    return (device.fp32_tflops or device.peak_tflops / 8) * 1e12


def _bytes_per_s(device: DeviceSpec) -> float:
    return device.memory_gb_per_s * 1e9 * calibration(device).memory_efficiency
