# SPDX-License-Identifier: Apache-2.0
"""A controller with its only worker in its own process."""

from dataclasses import dataclass, field

import jax
import numpy as np
import pytest

from hetjax.data.batches import Batch
from hetjax.errors import BadInput
from hetjax.launchers.in_process import InProcessConnections
from hetjax.plans.worker_map import EMBEDDED
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.runtime.rpc.schema import Json, Listen, TellReached
from tests.runtime.oracle import keep_gradients, oracle_gradients, random_batch
from tests.runtime.random_plans import Case, random_case
from tests.runtime.random_weights import random_params

pytestmark = pytest.mark.usefixtures("quick_compiling")

SEED = 1
FAILING, REFUSED = 1013, 1014  # steps
NODES = ("even", "odd")


@dataclass
class Work:
    case: Case
    runtime: StageRuntime
    closed: list[bool] = field(default_factory=list)

    def close(self) -> None:
        self.closed.append(True)
        self.runtime.close()

    def batch(self, step: int) -> Batch:
        if step == FAILING:
            raise ValueError("no such batch")
        if step == REFUSED:
            raise BadInput(got="step", allowed="another", fix="give another")
        return random_batch(self.case.plan, self.case.model.vocab_size, SEED)

    def validation(self, number: int) -> Batch:
        return self.batch(number)


@dataclass
class Lab:
    """A controller, and all work that its worker was given so far."""

    controller: Controller
    made: list[Work]


@pytest.fixture
def lab() -> Lab:
    case, made = random_case(SEED), list[Work]()
    params = random_params(case.model, SEED)

    def make(settings: Json) -> Work:
        devices: dict[str, list[jax.Device]] = dict.fromkeys(NODES, jax.devices())
        runtime = StageRuntime(case.plan, case.model, devices, keep_gradients())
        runtime.restore(
            lambda entry: params.get(
                entry.name.removeprefix("params."), np.zeros(entry.shape, entry.dtype)
            )
        )
        made.append(Work(case, runtime))
        return made[-1]

    controller = Controller(case.plan, InProcessConnections(EMBEDDED, make))
    controller.build({})
    controller.connect()
    return Lab(controller, made)


def test_steps_and_evaluations_are_those_of_one_jit(lab: Lab):
    case = lab.made[0].case
    batch = random_batch(case.plan, case.model.vocab_size, SEED)
    loss, gradients = oracle_gradients(
        case.model, random_params(case.model, SEED), batch
    )
    squares = sum(np.sum(np.square(g, dtype=np.float64)) for g in gradients.values())
    assert lab.controller.evaluate([0, 1]) == pytest.approx(loss, rel=1e-5)
    found = lab.controller.step(0)
    assert found.loss() == pytest.approx(loss, rel=1e-5)
    assert found.grad_norm == pytest.approx(squares**0.5, rel=1e-5)


def test_what_the_worker_raises_reaches_the_caller_and_the_worker_stays(lab: Lab):
    before = lab.controller.step(0)
    with pytest.raises(ValueError, match="no such batch"):
        lab.controller.step(FAILING)
    with pytest.raises(BadInput, match="give another"):
        lab.controller.step(REFUSED)
    assert lab.controller.connections.workers == [EMBEDDED]
    assert lab.controller.step(1) == before


def test_there_are_no_peers_to_listen_for(lab: Lab):
    assert lab.controller.connections.epoch == 1
    with pytest.raises(AssertionError, match="has no peers"):
        lab.controller.connections.ask({EMBEDDED: Listen()})


def test_another_build_lets_go_of_the_work_before_and_of_its_state(lab: Lab):
    lab.controller.step(0)
    lab.controller.build({})
    first, second = lab.made
    assert first.closed == [True] and not second.closed
    assert not any(state.masters for state in first.runtime.stages.values())
    (reached,) = lab.controller.connections.ask({EMBEDDED: TellReached()}).values()
    assert reached.at is None
    lab.controller.end()
    assert second.closed == [True]
