# SPDX-License-Identifier: Apache-2.0
"""The compiler's figures for the memory of a program, by backend."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiments.compiled_memory.cells import backend_of
from experiments.compiled_memory.compiling import rows_of
from hetjax.runtime.execution.compiled_bytes import made_bytes, temp_bytes

RESULTS = Path(__file__).parents[2] / "experiments/results"
MIB = 2**20


def program(platform: str, **said: int) -> Any:
    """Return a compiled program for which the compiler reports these bytes."""
    sharding = SimpleNamespace(device_set=[SimpleNamespace(platform=platform)])
    figures = {
        "argument_size_in_bytes": 500 * MIB,
        "output_size_in_bytes": 320 * MIB,
        "alias_size_in_bytes": 300 * MIB,
    }
    return SimpleNamespace(
        memory_analysis=lambda: SimpleNamespace(**figures, **said),
        input_shardings=((sharding,), {}),
        output_shardings=sharding,
    )


def test_a_program_here_needs_what_its_compiler_says():
    compiled = jax.jit(lambda x: jnp.sort(x) @ x).lower(jnp.ones((64, 64))).compile()
    analysis: Any = compiled.memory_analysis()
    assert temp_bytes(compiled) == analysis.temp_size_in_bytes > 0
    assert made_bytes(compiled) == analysis.temp_size_in_bytes + 64 * 64 * 4


def test_a_program_of_nothing_needs_nothing():
    """The update of a stage whose weights are all frozen is such a program."""
    assert made_bytes(jax.jit(lambda: ()).lower().compile()) == 0


@pytest.mark.parametrize(
    ("platform", "told", "live", "needed"),
    [
        ("gpu", 536, 320, 536),
        ("tpu", 536, 320, 428),  # heap 353, of which buffers hold 170: measured
        ("tpu", 36, 100, 36),  # bytes in other memories count as live
    ],
)
def test_what_is_lost_between_buffers_does_not_count_twice(
    platform: str, told: int, live: int, needed: int
):
    peak = (500 + 320 - 300 + live) * MIB
    compiled = program(
        platform, temp_size_in_bytes=told * MIB, peak_memory_in_bytes=peak
    )
    assert temp_bytes(compiled) == needed * MIB
    assert made_bytes(compiled) == (needed + 320) * MIB


def test_no_heap_that_a_tpus_compiler_laid_out_is_larger_than_what_is_told():
    rows = [
        row
        for path in sorted(RESULTS.glob("compiled_memory_draw*.jsonl"))
        for cell, row in rows_of(path).items()
        if backend_of(cell.target) == "tpu" and not row["failures"]
    ]
    assert rows
    for row in rows:
        for name, heap in row["temp_bytes"].items():
            peak = (500 + 320 - 300) * MIB + row["live_bytes"][name]
            told = row["reported_bytes"][name]
            compiled = program(
                "tpu", temp_size_in_bytes=told, peak_memory_in_bytes=peak
            )
            needed = temp_bytes(compiled)
            assert needed is not None
            # the figure is 0 for forwards that need next to nothing
            assert heap <= needed + MIB, (row["target"], row["model"], name)
