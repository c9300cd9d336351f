# SPDX-License-Identifier: Apache-2.0
"""Packed sequences: any plan gives the loss and gradients of the documents alone."""

import jax
import numpy as np
import pytest

from hetjax.data.batches import Batch, aux_weight, num_targets
from hetjax.launchers.in_process import InProcessConnections
from hetjax.plans.worker_map import EMBEDDED
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.runtime.rpc.schema import Json
from tests.runtime.oracle import (
    assert_gradients_equal,
    keep_gradients,
    kept_gradients,
)
from tests.runtime.packed_cases import expected, packed_batch, packed_case
from tests.runtime.random_weights import random_params
from tests.runtime.test_in_process import Work
from tests.short_runs import draws

pytestmark = pytest.mark.usefixtures("quick_compiling")

# interleaved GPT, zero-bubble Llama, experts with split I and W on 2 x 1 and 1 x 4
SEEDS = [9, 4, 35]


class PackedWork(Work):
    def batch(self, step: int) -> Batch:
        return packed_batch(self.case, step)


@pytest.mark.parametrize("seed", draws(SEEDS, short=1))
def test_loss_gradients_and_evaluations_are_those_of_the_documents_alone(seed: int):
    case, made = packed_case(seed), list[Work]()
    params = random_params(case.model, seed)

    def make(settings: Json) -> Work:
        devices: dict[str, list[jax.Device]] = dict.fromkeys(
            ("even", "odd"), jax.devices()
        )
        runtime = StageRuntime(case.plan, case.model, devices, keep_gradients())
        runtime.restore(
            lambda entry: params.get(
                entry.name.removeprefix("params."), np.zeros(entry.shape, entry.dtype)
            )
        )
        made.append(PackedWork(case, runtime))
        return made[-1]

    controller = Controller(case.plan, InProcessConnections(EMBEDDED, make))
    controller.build({})
    controller.connect()
    batch = packed_batch(case, 0)
    loss, gradients = expected(case.model, params, batch)
    assert controller.evaluate([0]) == pytest.approx(loss, rel=1e-5)
    found = controller.step(0)
    assert found.num_tokens == num_targets(batch) < np.sum(batch[2] > 0)
    assert aux_weight(batch) < 1
    assert found.loss() == pytest.approx(loss, rel=1e-5)
    assert_gradients_equal(kept_gradients(made[0].runtime), gradients)
