# SPDX-License-Identifier: Apache-2.0
"""Updates and steps are compared to the bit, here and in other processes."""

import os
import subprocess
import sys
from collections.abc import Mapping

import jax
import numpy as np
import pytest

from experiments.gpu.claims import CLAIMS
from experiments.gpu.models.one_stage import NODE
from experiments.gpu.models.repeated import (
    State,
    largest_error,
    stepped,
    unlike_names,
    updated,
)
from experiments.gpu.parts import bits
from experiments.gpu.processes.compiling import TO_THE_SAME_BITS
from experiments.gpu.rows import PartFile, Row
from experiments.gpu.setting import Setting
from hetjax.cluster.cluster import Node
from hetjax.runtime.execution.stage_runtime import StageRuntime
from tests import jax_settings

Rows = Mapping[str, Row]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The part as a session runs it, in a process without the tests' JAX settings."""
    output = tmp_path_factory.mktemp("session")
    command = [sys.executable, "-m", "experiments.gpu.part", "bits", "--quick"]
    command += ["--platform", "cpu", "--output", str(output), "--limit-s", "600"]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    found = PartFile(output, "bits").read()
    assert found.state == "done", found.why
    return {row.what: row for row in found.rows}


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["again in one process", "in another process"])
@pytest.mark.parametrize("programs", ["", ", deterministic"])
@pytest.mark.parametrize("what", ["an update", "a step"])
def test_what_a_cpu_computes_again_is_the_same_to_the_bit(
    rows: Rows, what: str, where: str, programs: str
):
    name = f"{what} {where}{programs}"
    if f"{name}: equal to the bit" not in rows:
        assert (what, programs) == ("an update", ", deterministic")
        return
    row = rows[f"{name}: equal to the bit"]
    assert row.measured is True
    assert (TO_THE_SAME_BITS in row.note) is bool(programs)
    assert rows[f"{name}: largest relative distance"].measured == 0


@pytest.mark.nightly
def test_steps_of_both_kinds_of_programs_are_timed(rows: Rows):
    default, other = (rows[f"step, {k}"].measured for k in ("default", "deterministic"))
    assert isinstance(default, float) and isinstance(other, float) and default > 0
    assert rows[bits.COST].measured == pytest.approx(other / default)


def test_steps_are_not_timed_where_two_do_not_fit(monkeypatch: pytest.MonkeyPatch):
    small = Node(name=NODE, device="cpu", count=1, memory_gib=0.001)
    monkeypatch.setattr(bits, "node_of", lambda device: small)
    (row,) = bits._cost(Setting(platform="cpu", quick=True))
    assert row.what == bits.COST and row.measured is None and "memory" in row.note


def test_a_process_starts_with_the_flags_that_it_is_given():
    with bits._process({"XLA_FLAGS": "--one --more"}) as process:
        assert process.submit(os.getenv, "XLA_FLAGS").result() == "--one --more"
    with bits._process() as process:
        assert process.submit(os.getenv, "XLA_FLAGS").result() == os.getenv("XLA_FLAGS")


@pytest.fixture
def _quick_compiling(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", jax.stages.Lowered.compile)
    jax_settings.compile_quickly()
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        yield


@pytest.mark.usefixtures("_quick_compiling")
def test_an_update_is_the_first_of_adamw_each_time(monkeypatch: pytest.MonkeyPatch):
    """Unless the gradient nearly vanishes, the first update moves by the rate, 1e-4,
    whatever the gradient's size, besides a decay of 1e-4 of the weight."""
    before, initialise = list[State](), StageRuntime.initialise

    def seen(runtime: StageRuntime, seed: int) -> None:
        initialise(runtime, seed)
        before.append({entry.name: np.array(v) for entry, v in runtime.entries()})

    monkeypatch.setattr(StageRuntime, "initialise", seen)
    first, again = updated(Setting(platform="cpu", quick=True), times=2).states
    assert first and unlike_names(first, again) == []
    for name, weights in first.items():
        moved = abs(weights - before[0][name] * (1 - 1e-4 * 1e-4))
        assert moved.max() < 1.01e-4
        assert np.median(moved) == pytest.approx(1e-4, rel=1e-2)


@pytest.mark.usefixtures("_quick_compiling")
def test_a_step_begins_anew_each_time():
    first, again = stepped(Setting(platform="cpu", quick=True), times=2).states
    assert unlike_names(first, again) == []
    assert any(np.any(v) for n, v in first.items() if n.startswith("opt."))


@pytest.mark.nightly
def test_every_form_of_attention_is_held_against_float32(rows: Rows):
    errors = {
        what.rpartition(" ")[2]: row.measured
        for what, row in rows.items()
        if what.startswith("gradient error with attention")
    }
    assert errors.keys() == {"chunked", "xla"}
    assert errors["xla"] != errors["chunked"]  # another form, not the same again
    assert all(1e-4 < float(str(error)) < 5e-2 for error in errors.values())  # bfloat16
    assert rows["gradients of all forms of attention within rounding"].measured is True


@pytest.mark.nightly
def test_what_claims_ask_for_is_measured(rows: Rows):
    asked = [claim.what for claim in CLAIMS if claim.part == "bits"]
    assert asked and {*asked} <= rows.keys()


def test_one_bit_is_a_difference():
    one = {"a": np.ones(3, np.float32), "zero": np.zeros(2, np.float32)}
    other = one | {"zero": -one["zero"]}
    assert unlike_names(one, one) == []
    assert unlike_names(one, other) == ["zero"]  # equal numbers, unequal bits


def test_the_error_is_the_largest_of_the_parameters():
    exact = {"a": np.array([3.0, 4.0]), "b": np.array([2.0]), "zero": np.zeros(2)}
    found = {"a": np.array([3.0, 4.5]), "b": np.array([2.5]), "zero": np.ones(2)}
    assert largest_error(found, exact) == 0.25
