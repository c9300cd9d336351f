# SPDX-License-Identifier: Apache-2.0
"""Targets that do not count: any plan gives the loss and gradients of one jit.

The oracle uses no code of hetjax that knows such targets: it has whole logits, and
selects the targets that count before it sums.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.data.batches import UNCOUNTED, Batch
from hetjax.launchers.in_process import InProcessConnections
from hetjax.models.model import Model, apply, bind
from hetjax.plans.worker_map import EMBEDDED
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.runtime.rpc.schema import Json
from tests.runtime.oracle import (
    assert_gradients_equal,
    keep_gradients,
    kept_gradients,
    random_batch,
)
from tests.runtime.random_plans import Case, random_case
from tests.runtime.random_weights import random_params
from tests.runtime.test_in_process import Work
from tests.short_runs import draws

pytestmark = pytest.mark.usefixtures("quick_compiling")

SEEDS = [1, 3, 4]  # uneven plans without experts


class RowsWork(Work):
    def batch(self, step: int) -> Batch:
        return uneven_batch(self.case, step)


def uneven_batch(case: Case, step: int) -> Batch:
    """Return sequences with unlike counts of targets that count, some with none."""
    inputs_GL, targets_GL = random_batch(case.plan, case.model.vocab_size, step)
    num_sequences, seq_len = targets_GL.shape
    counted_G = np.arange(num_sequences) * (step + 3) % (seq_len + 1)
    counted_G[-1] = seq_len  # one sequence has targets, whatever the shape
    is_counted_GL = np.arange(seq_len)[None] < counted_G[:, None]
    return inputs_GL, np.where(is_counted_GL, targets_GL, UNCOUNTED).astype(np.int32)


def expected(
    model: Model, params: dict[str, Any], batch: Batch
) -> tuple[float, dict[str, np.ndarray]]:
    inputs_GL, targets_GL = batch
    rows, columns = np.nonzero(targets_GL >= 0)

    def loss(params: dict[str, Any]) -> jax.Array:
        x: Any = jnp.asarray(inputs_GL)
        for spec in model.modules:
            own = {
                path.removeprefix(spec.path + "."): value
                for path, value in params.items()
                if path.startswith(spec.path + ".")
            }
            own |= {name: params[owner] for name, owner in spec.tied}
            if spec is not model.modules[-1]:
                x, _ = apply(spec, own, x)
            else:
                head: Any = bind(spec, own)
                x = head.logits(x)
        log_p_NV = jax.nn.log_softmax(x[rows, columns])
        return -jnp.mean(log_p_NV[np.arange(len(rows)), targets_GL[rows, columns]])

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    return float(value), jax.tree.map(np.asarray, gradients)


@pytest.mark.parametrize("seed", draws(SEEDS, short=1))
def test_loss_gradients_and_evaluations_are_those_of_the_targets_that_count(seed: int):
    case, made = random_case(seed), list[Work]()
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
        made.append(RowsWork(case, runtime))
        return made[-1]

    controller = Controller(case.plan, InProcessConnections(EMBEDDED, make))
    controller.build({})
    controller.connect()
    batches = [uneven_batch(case, step) for step in range(2)]
    counts = [int(np.sum(targets_GL >= 0)) for _, targets_GL in batches]
    (loss, gradients), (other, _) = (
        expected(case.model, params, batch) for batch in batches
    )
    both = (loss * counts[0] + other * counts[1]) / sum(counts)
    assert controller.evaluate([0, 1]) == pytest.approx(both, rel=1e-5)
    found = controller.step(0)
    assert found.num_tokens == counts[0] < batches[0][1].size
    assert found.loss() == pytest.approx(loss, rel=1e-5)
    assert_gradients_equal(kept_gradients(made[0].runtime), gradients)
