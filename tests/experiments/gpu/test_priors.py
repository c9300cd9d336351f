# SPDX-License-Identifier: Apache-2.0
"""A card's rates against what costs assume, and fits of the constants."""

import math
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest

from experiments.gpu.claims import CLAIMS
from experiments.gpu.parts.priors import HOST_TO_DEVICE, measure
from experiments.gpu.rows import Row
from experiments.gpu.setting import Setting
from experiments.gpu.timing.attention_passes import AttentionPasses, HeadSizes
from experiments.gpu.timing.attention_rows import LONGEST
from experiments.gpu.timing.calibrating import (
    TimedProduct,
    attention_efficiency,
    fitted_products,
)
from experiments.gpu.timing.timed_programs import count_kernels
from hetjax.cluster.catalogue import catalogue
from hetjax.costs.roofline import Calibration, calibration

PEAK, LAUNCH_S = 500e12, 3e-6
SIZES = [(1, n, n, n) for n in (512, 1024, 2048, 4096, 8192)]
SIZES += [(1, 4096, 8192, 2048), (1, 4096, 512, 2048), (1, 512, 8192, 2048)]


@pytest.fixture(scope="module")
def rows() -> Sequence[Row]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("experiments.gpu.timing.clock._SAMPLES_S", 0.0)
        return [*measure(Setting(platform="cpu", quick=True))]


def named(rows: Sequence[Row], start: str) -> list[Row]:
    found = [row for row in rows if row.what.startswith(start)]
    assert found, start
    return found


def seconds(
    sizes: tuple[int, int, int, int], efficiency: float, half: float, number: float = 1
) -> float:
    """Return the formula that costs use, written out."""
    batch, m, n, k = sizes
    share = efficiency * m / (m + half) * n / (n + half) * k / (k + half)
    return LAUNCH_S + number * 2 * batch * m * n * k / (PEAK * share)


@pytest.mark.parametrize(("efficiency", "half"), [(0.62, 64.0), (0.9, 300.0)])
def test_constants_that_made_the_times_are_found_again(efficiency: float, half: float):
    times = [
        TimedProduct(sizes=sizes, seconds=seconds(sizes, efficiency, half))
        for sizes in SIZES
    ]
    found = fitted_products(times, PEAK, LAUNCH_S)
    assert found.matmul_efficiency == pytest.approx(efficiency, rel=1e-3)
    assert found.half_size == pytest.approx(half, rel=1e-2)
    assert found.launch_s == LAUNCH_S


def test_one_product_that_went_wrong_moves_the_constants_little():
    times = [
        TimedProduct(
            sizes=sizes, seconds=seconds(sizes, 0.7, 64.0) * (3 if at == 2 else 1)
        )
        for at, sizes in enumerate(SIZES)
    ]
    found = fitted_products(times, PEAK, LAUNCH_S)
    assert found.matmul_efficiency == pytest.approx(0.7, rel=0.05)


def test_the_efficiency_of_attention_is_found_with_its_half_sizes():
    number = 5 * (9 / 16)  # of eight blocks, those on and below the diagonal
    rate = lambda length: 0.25 * PEAK * length / (length + 900) * 128 / (128 + 32)  # noqa: E731
    passes = [
        TimedProduct(
            sizes=(4, length, length, 128),
            number=number,
            seconds=LAUNCH_S + 8 * length * length * 128 * number / rate(length),
        )
        for length in (512, 1024, 2048)
    ]
    known = Calibration(
        matmul_efficiency=0.8,
        launch_s=LAUNCH_S,
        attention_half_length=900.0,
        attention_half_head=32.0,
    )
    found = attention_efficiency(passes, PEAK, known)
    assert found == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_attention_of_heads_of_128_is_counted_as_an_h200_gave_it(name: str):
    """562 TFLOP/s, both passes together."""
    passes = AttentionPasses(
        sequences=1,
        length=65536,
        heads=HeadSizes(num_heads=32, num_kv_heads=8, head_size=128),
        form="cudnn",
        precision="bfloat16",
    )
    spec = catalogue()["H200"]
    rate = passes.predicted(spec)[f"attention_{name}"].flops_per_s / 1e12
    assert rate == pytest.approx(562.1, rel=0.05)


def test_each_form_of_attention_has_a_rate_beside_that_of_costs(rows: Sequence[Row]):
    found = named(rows, "attention forward") + named(rows, "attention backward")
    assert {row.what.split(", ")[-1] for row in found} == {"chunked", "xla"}
    assert all(row.measured and row.predicted for row in found)


def test_kernels_of_a_program_are_counted_as_they_were_compiled():
    """On a CPU each product is one kernel; for an H100, one of these would be two."""
    x = jnp.ones((128, 128))
    program = jax.jit(lambda x: x @ x @ x @ x).lower(x).compile()
    assert count_kernels(program.as_text()) == 3


def test_kernels_that_are_launched_as_a_graph_count_too():
    text = """
%gemm_fusion (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  ROOT %dot.1 = f32[8,8]{1,0} dot(%a, %b)
}

%command_buffer (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %fusion.1 = f32[8,8]{1,0} fusion(%a, %b), kind=kCustom, calls=%gemm_fusion
  ROOT %fusion.2 = f32[8,8]{1,0} fusion(%fusion.1, %b), kind=kCustom, calls=%gemm_fusion
}

ENTRY %main (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %call = f32[8,8]{1,0} call(%a, %b), to_apply=%command_buffer
  ROOT %custom-call = f32[8,8]{1,0} custom-call(%call), custom_call_target="__cublas"
}
"""
    assert count_kernels(text) == 3


def test_products_are_measured_in_every_precision(rows: Sequence[Row]):
    found = named(rows, "product of 128 x 128 x 128")
    precisions = [row.what.split()[-1] for row in found]
    assert {*precisions} == {"bfloat16", "float16", "float32"}
    assert all(row.unit == "TFLOP/s" and row.ratio for row in found)


def test_copies_and_launches_stand_beside_what_costs_count_on(rows: Sequence[Row]):
    assert named(rows, "memory, read and written")[0].predicted == 10.0 * 0.8
    assert named(rows, "another small kernel")[0].predicted == pytest.approx(2.0)
    assert named(rows, HOST_TO_DEVICE)[0].predicted == 5.0
    for way in ("device to host", "a program that does nothing"):
        assert all(row.measured for row in named(rows, way))


def test_every_constant_stands_beside_that_of_today(rows: Sequence[Row]):
    today = calibration(catalogue()["cpu"])
    for name in ("matmul_efficiency", "half_size", "memory_efficiency", "launch_s"):
        (row,) = [row for row in rows if row.what == f"constant {name}"]
        assert row.predicted == getattr(today, name)
        assert isinstance(row.measured, float) and math.isfinite(row.measured)


def test_nothing_is_begun_that_would_not_end_in_time():
    setting = Setting(platform="cpu", quick=True, ends_s=time.monotonic() + 1)
    assert [*measure(setting)] == []


def test_every_claim_is_decided_by_a_row(rows: Sequence[Row]):
    wanted = {claim.what for claim in CLAIMS if claim.part == "priors"}
    assert LONGEST in wanted
    assert wanted <= {row.what for row in rows}
