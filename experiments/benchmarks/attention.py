# SPDX-License-Identifier: Apache-2.0
"""Compares attention in blocks with attention that keeps all scores, on this CPU.

    python -m experiments.benchmarks.attention > experiments/results/attention_cpu.json

Prints one JSON object. A round calls forward and backward of both forms (`chunked`,
then `xla`; every second round in reverse order). A call has 2,048 positions, in as many
sequences as they make. `ratio` is the median over rounds of chunked / xla, by
precision, heads (number x size, half as many of keys) and positions of a sequence.
`step_s` has the medians themselves. Other load on the machine affects both forms of a
round.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.machine import machine
from hetjax.mesh.process_setup import simulate_devices
from hetjax.models.attention.attention import AttentionForm, attend

COMMAND = "python -m experiments.benchmarks.attention"
LENGTHS = (128, 256, 512, 1_024, 2_048)  # positions of a sequence
HEADS = {"4x16": (4, 16), "16x64": (16, 64)}
DTYPES = ("float32", "bfloat16")
FORMS: tuple[AttentionForm, ...] = ("chunked", "xla")
_POSITIONS = 2_048  # of a call
_WARM_UP = 2  # rounds

Call = Callable[[], object]


def calls(dtype: str, heads: str, length: int) -> dict[str, Call]:
    """Return compiled forward and backward of each form, on the same arrays."""
    (num, size), rng = HEADS[heads], np.random.default_rng(0)
    q, k, v, dz = (
        jnp.asarray(rng.normal(size=(_POSITIONS // length, length, n, size)), dtype)
        for n in (num, num // 2, num // 2, num)
    )

    def passes(form: AttentionForm, q: Any, k: Any, v: Any, dz: Any) -> Any:
        z, vjp = jax.vjp(partial(attend, form=form), q, k, v)
        return z, vjp(dz)

    def call(program: Any) -> object:
        return jax.block_until_ready(program(q, k, v, dz))

    programs = {
        form: jax.jit(partial(passes, form)).lower(q, k, v, dz).compile()
        for form in FORMS
    }
    return {form: partial(call, program) for form, program in programs.items()}


def alternating(calls: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each call in every round."""
    times_s: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + _WARM_UP):
        for name in sorted(calls, reverse=number % 2 == 1):
            start_s = time.perf_counter()
            calls[name]()
            if number >= _WARM_UP:
                times_s[name].append(time.perf_counter() - start_s)
    return times_s


def measure(lengths: tuple[int, ...], rounds: int) -> dict[str, Any]:
    ratio: dict[str, Any] = {dtype: {heads: {} for heads in HEADS} for dtype in DTYPES}
    step_s: dict[str, Any] = {dtype: {heads: {} for heads in HEADS} for dtype in DTYPES}
    for dtype, heads, length in product(DTYPES, HEADS, lengths):
        times_s = alternating(calls(dtype, heads, length), rounds)
        pairs = zip(times_s["chunked"], times_s["xla"], strict=True)
        ratio[dtype][heads][str(length)] = median(ours / all_ for ours, all_ in pairs)
        step_s[dtype][heads][str(length)] = {
            form: median(found) for form, found in times_s.items()
        }
    found = [r for of in ratio.values() for by in of.values() for r in by.values()]
    return {"largest_ratio": max(found), "ratio": ratio, "step_s": step_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    simulate_devices(1)
    about = {"command": COMMAND, "machine": machine(), "rounds": rounds}
    print(json.dumps(about | measure(LENGTHS, rounds), indent=1))


if __name__ == "__main__":
    main()
