# SPDX-License-Identifier: Apache-2.0
"""Any valid plan gives the loss and gradients of the model in one jit."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from hetjax.runtime.embedded import Embedded

sys.path.append(str(Path(__file__).parent))
from oracle import keep_gradients, kept_gradients, oracle_gradients, random_batch
from random_plans import Case, random_case

SEED = 7


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "plan_seed" in metafunc.fixturenames:
        metafunc.parametrize("plan_seed", range(metafunc.config.getoption("plans")))


def run_once(case: Case, params: dict[str, np.ndarray]):
    devices = jax.devices()
    runtime = Embedded(
        case.plan, case.model, {"even": devices, "odd": devices}, keep_gradients()
    )
    def read(entry):
        if entry.name.startswith("params."):
            return params[entry.name.removeprefix("params.")]
        return np.zeros(entry.shape, entry.dtype)
    runtime.restore(read)
    batch = random_batch(case.plan, case.model.vocab_size, SEED)
    result = runtime.step(0, batch)
    return result, kept_gradients(runtime)


def random_params(model, seed):
    """Params of a sensible scale drawn by numpy, so that no compile is spent on it."""
    from hetjax.models.model import abstract_params
    rng = np.random.default_rng(seed)
    return {
        f"{spec.path}.{name}": (0.3 * rng.standard_normal(p.shape) + (name.endswith("scale"))).astype(np.float32)
        for spec in model.modules for name, p in abstract_params(spec).items()
    }

def test_loss_and_gradients_of_random_plans_equal_those_of_one_jit(plan_seed: int):
    case = random_case(plan_seed)
    params = random_params(case.model, plan_seed)
    batch = random_batch(case.plan, case.model.vocab_size, SEED)
    loss, expected = oracle_gradients(case.model, params, batch)
    result, found = run_once(case, params)
    assert result.loss() == pytest.approx(loss, rel=1e-5)
    assert found.keys() == expected.keys()
    for path, reference in expected.items():
        error = np.linalg.norm(found[path] - reference)
        scale = np.linalg.norm(expected[path.replace("k_bias", "q_bias")])
        assert error <= 1e-5 * scale, path
