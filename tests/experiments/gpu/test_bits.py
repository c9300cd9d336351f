# SPDX-License-Identifier: Apache-2.0
"""Steps are compared to the bit, here and in another process, and with float32."""

import subprocess
import sys
from collections.abc import Mapping

import numpy as np
import pytest

from experiments.gpu.claims import CLAIMS
from experiments.gpu.parts.bits import largest_error, unlike_names
from experiments.gpu.rows import PartFile, Row

Rows = Mapping[str, Row]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The part as a session runs it: JAX has other settings in the tests' process
    than in those that it starts."""
    output = tmp_path_factory.mktemp("session")
    command = [sys.executable, "-m", "experiments.gpu.part", "bits", "--quick"]
    command += ["--platform", "cpu", "--output", str(output), "--limit-s", "600"]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    found = PartFile(output, "bits").read()
    assert found.state == "done", found.why
    return {row.what: row for row in found.rows}


@pytest.mark.parametrize(
    "what", ["a step again in one process", "a step in another process"]
)
def test_a_step_on_a_cpu_is_the_same_to_the_bit(rows: Rows, what: str):
    assert rows[f"{what}: equal to the bit"].measured is True
    assert rows[f"{what}: largest relative distance"].measured == 0


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


def test_what_claims_ask_for_is_measured(rows: Rows):
    asked = [claim.what for claim in CLAIMS if claim.part == "bits"]
    assert asked and {*asked} <= rows.keys()


def test_one_bit_is_a_difference():
    one = {"a": np.ones(3, np.float32), "zero": np.zeros(2, np.float32)}
    other = one | {"zero": -one["zero"]}
    assert unlike_names(one, one) == []
    assert unlike_names(one, other) == ["zero"]  # equal numbers, other bits


def test_the_error_is_the_largest_of_the_parameters():
    exact = {"a": np.array([3.0, 4.0]), "b": np.array([2.0]), "zero": np.zeros(2)}
    found = {"a": np.array([3.0, 4.5]), "b": np.array([2.5]), "zero": np.ones(2)}
    assert largest_error(found, exact) == 0.25
