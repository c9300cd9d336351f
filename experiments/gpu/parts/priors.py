# SPDX-License-Identifier: Apache-2.0
"""Measures what costs assume of a card: products, attention, bytes, launches.

First yields the times, the most doubtful first, each beside the predicted time. Then
yields the constants of `hetjax/costs/roofline.py` fitted to these times, beside today's
constants. Owns which sizes are measured. Does not own the programs
(`timed_programs.py`, `attention_rows.py`) nor the fit (`calibrating.py`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import cast

from experiments.gpu.rows import Row
from experiments.gpu.setting import Setting
from experiments.gpu.timing.attention_passes import HeadSizes
from experiments.gpu.timing.attention_rows import AttentionRows
from experiments.gpu.timing.calibrating import (
    TimedProduct,
    attention_efficiency,
    fitted_products,
)
from experiments.gpu.timing.card import Card
from experiments.gpu.timing.timed_programs import (
    copy_s,
    host_copies,
    idle_program_s,
    kernel_s,
    product_s,
)
from hetjax.cluster.catalogue import Precision
from hetjax.costs.roofline import (
    calibration,
    flops_per_s,
    host_link_bytes_per_s,
    matmul_s,
)
from hetjax.models.attention.kernel_attention import BACKWARD, FORWARD
from hetjax.models.configs import LlamaConfig
from hetjax.models.presets import model_config

HOST_TO_DEVICE = "host to device"
_LAST_S = 10.0  # with less time left, no measurement starts
_PRECISIONS: tuple[Precision, ...] = ("bfloat16", "float16", "float32")
_PROGRAM_S = 1e-3  # least time of a program's products: its launch is then negligible
_MOST_PAIRS = 16  # of products in a program
_MOST_OF_MEMORY = 1 / 16  # that a copied array takes

Sizes = tuple[int, int, int]  # rows, columns, depth


@dataclass(slots=True)
class _Times:
    """The times that the fit uses; collected while rows are measured."""

    products: list[TimedProduct] = field(default_factory=list)
    bytes_per_s: list[float] = field(default_factory=list)
    launches_s: list[float] = field(default_factory=list)


def measure(setting: Setting) -> Iterator[Row]:
    card, times = Card.here(setting.device), _Times()
    model = cast(LlamaConfig, model_config(setting.choose("llama-1b", "tiny")))
    lengths = setting.choose((65536, 8192, 2048, 32768, 4096, 16384, 1024), (256, 128))
    squares = [
        (size, size, size)
        for size in setting.choose((8192, 4096, 2048, 1024, 512, 16384), (64, 128))
    ]
    attention = AttentionRows(
        card=card, heads=_heads(model), positions=setting.choose(8192, 256)
    )
    others: list[Precision] = [p for p in _PRECISIONS if p != card.precision]
    for_constants = chain(
        attention.longest(lengths[0]),
        attention.as_stages(lengths[:2]),
        _products(card, card.precision, squares, times),
        _products(card, card.precision, _decoder(model), times),
        _memory(card, setting, times),
        _launches(card, times),
        _host_link(card, setting),
        attention.as_stages(lengths[2:]),
    )
    besides = chain(
        attention.otherwise(sorted(lengths)),
        *(_products(card, precision, squares) for precision in others),
    )
    yield from _in_time(for_constants, setting)
    yield from _constants(card, times, attention.timed)
    yield from _in_time(besides, setting)


def _in_time(rows: Iterator[Row], setting: Setting) -> Iterator[Row]:
    while setting.left_s() > _LAST_S and (row := next(rows, None)):
        yield row


def _heads(model: LlamaConfig) -> HeadSizes:
    return HeadSizes(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_size=model.size_of_heads,
    )


def _decoder(model: LlamaConfig) -> Iterator[Sizes]:
    """Yield the products of a sequence: MLP, attention output, keys and head. Then
    yield that of a short sequence in the MLP."""
    rows, depth = model.max_seq_len, model.hidden_size
    keys = model.num_kv_heads * model.size_of_heads
    for columns in (model.inner_size, depth, keys, model.vocab_size):
        yield rows, columns, depth
    yield rows // 8, model.inner_size, depth


def _products(
    card: Card,
    precision: Precision,
    sizes: Iterator[Sizes] | Sequence[Sizes],
    times: _Times | None = None,
) -> Iterator[Row]:
    for rows, columns, depth in sizes:
        whole = 1, rows, columns, depth
        launch_s = calibration(card.spec).launch_s
        counted_s = launch_s + matmul_s(whole, precision, card.spec)
        pairs = min(math.ceil(_PROGRAM_S / counted_s / 2), _MOST_PAIRS)
        what = f"product of {rows:,} x {depth:,} x {columns:,} in {precision}"
        predicted = 2e-12 * math.prod(whole) / counted_s
        try:
            found_s = product_s(card.device, *whole[1:], precision, pairs)
        except RuntimeError as error:  # XLA's: not supported here, or too large
            why = str(error).partition("\n")[0]
            yield Row(what=what, measured=None, predicted=predicted, note=why)
            continue
        timed = TimedProduct(sizes=whole, seconds=found_s)
        if times is not None:
            times.products.append(timed)
        yield Row(
            what=what,
            measured=timed.flops_per_s / 1e12,
            unit="TFLOP/s",
            predicted=predicted,
            note=f"{1e6 * found_s:.2f} us; {2 * pairs} in a program",
        )


def _memory(card: Card, setting: Setting, times: _Times) -> Iterator[Row]:
    most = int(card.spec.memory_gib * 2**30 * _MOST_OF_MEMORY)
    num_bytes = min(setting.choose(1 << 30, 1 << 20), most)
    rate = 2 * num_bytes / copy_s(card.device, num_bytes)
    times.bytes_per_s.append(rate)
    constants = calibration(card.spec)
    yield Row(
        what="memory, read and written",
        measured=rate / 1e9,
        unit="GB/s",
        predicted=card.spec.memory_gb_per_s * constants.memory_efficiency,
        note=f"copies of {num_bytes / 2**20:,.0f} MiB",
    )


def _launches(card: Card, times: _Times) -> Iterator[Row]:
    times.launches_s.append(kernel_s(card.device))
    yield Row(
        what="another small kernel in a program",
        measured=1e6 * times.launches_s[-1],
        unit="us",
        predicted=1e6 * calibration(card.spec).launch_s,
        note="products of 128 x 128 in float32, one after the other",
    )
    yield Row(
        what="a program that does nothing, waited for",
        measured=1e6 * idle_program_s(card.device, at_once=1),
        unit="us",
    )
    yield Row(
        what="a program that does nothing, queued",
        measured=1e6 * idle_program_s(card.device, at_once=100),
        unit="us",
    )


def _host_link(card: Card, setting: Setting) -> Iterator[Row]:
    num_bytes = setting.choose(256 << 20, 1 << 20)
    for way, seconds in host_copies(card.device, num_bytes).items():
        yield Row(
            what=way,
            measured=num_bytes / seconds() / 1e9,
            unit="GB/s",
            predicted=host_link_bytes_per_s(card.spec) / 1e9,
            note=f"{num_bytes / 2**20:,.0f} MiB",
        )


def _constants(
    card: Card, times: _Times, attention: dict[str, list[TimedProduct]]
) -> Iterator[Row]:
    """Yield the constants of `Calibration` that the measured times determine."""
    today, fitted = calibration(card.spec), calibration(card.spec)
    peak = flops_per_s(card.spec, card.precision)
    if times.launches_s:
        launch_s = median(times.launches_s)
        yield _constant("launch_s", launch_s, today.launch_s)
    else:
        launch_s = today.launch_s
    if len(times.products) > 1:
        fitted = fitted_products(times.products, peak, launch_s)
        efficiency = today.matmul_efficiency
        yield _constant("matmul_efficiency", fitted.matmul_efficiency, efficiency)
        yield _constant("half_size", fitted.half_size, today.half_size)
    if times.bytes_per_s:
        share = median(times.bytes_per_s) / (card.spec.memory_gb_per_s * 1e9)
        yield _constant("memory_efficiency", share, today.memory_efficiency)
    for name, way in ((FORWARD, "forward"), (BACKWARD, "backward")):
        if attention[name]:
            found = attention_efficiency(attention[name], peak, fitted)
            what = f"matmul_efficiency of attention {way}"
            yield _constant(what, found, today.attention_efficiency)


def _constant(name: str, measured: float, today: float) -> Row:
    note = "hetjax/costs/roofline.py, fitted to the rows above"
    return Row(what=f"constant {name}", measured=measured, predicted=today, note=note)
