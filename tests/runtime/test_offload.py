# SPDX-License-Identifier: Apache-2.0
"""Masters and optimizer state on the host change no number of a run.

The devices then hold no more than the memory model says.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from hetjax.optimizers.optimizer import optimizer
from hetjax.plans.plan import Offload, Plan
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.runtime.execution.updates.update import UpdatePrograms
from hetjax.training.settings.config import OptimizerConfig
from tests.runtime.oracle import random_batch
from tests.runtime.test_update import MODEL, PLAN, fully_optimised
from tests.short_runs import draws, rows_drawn

EXACT = {"xla_disable_hlo_passes": "algsimp", "xla_backend_optimization_level": 0}
ALL = {(0, 0), (0, 1), (1, 0)}
ALONE = replace(PLAN, global_batch=6, replicas=PLAN.replicas[:1])
CUT = replace(PLAN, global_batch=4, replicas=PLAN.replicas[1:])  # data 2 x tensor 2


def offloaded(plan: Plan, stages: Iterable[tuple[int, int]]) -> Plan:
    """Return the plan with the masters of these stages on the host."""

    def of(r: int, s: int) -> Offload:
        return "optimizer" if (r, s) in stages else "none"

    replicas = tuple(
        replace(
            replica,
            stages=tuple(
                replace(stage, offload=of(r, s))
                for s, stage in enumerate(replica.stages)
            ),
        )
        for r, replica in enumerate(plan.replicas)
    )
    return replace(plan, replicas=replicas)


def runtime_of(plan: Plan, dtype: str = "float32", **options: Any) -> StageRuntime:
    devices = jax.devices()
    nodes = {"a": devices[:2], "b": devices[2:6]}
    config = OptimizerConfig(learning_rate=1e-2, warmup_steps=0, **options)
    rule = optimizer(config, 9)
    return StageRuntime(plan, MODEL, nodes, rule, clip_norm=0.5, dtype=dtype)


AVERAGED_MUON = {"name": "muon", "ema": 0.9}


def trained(runtime: StageRuntime, steps: range = range(3)) -> dict[str, np.ndarray]:
    if not steps.start:
        runtime.initialise(0)
    for step in steps:
        runtime.step(step, random_batch(runtime.plan, MODEL.vocab_size, step))
    return {entry.name: np.array(value) for entry, value in runtime.entries()}


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys() and found
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.parametrize(
    ("plan", "stages", "dtype"),
    rows_drawn(
        [
            (PLAN, ALL, "bfloat16"),
            (PLAN, {(0, 1)}, "float32"),
            (PLAN, {(1, 0)}, "float32"),
            (ALONE, ALL, "float32"),
        ],
        short=2,
    ),
    ids=["all", "one of a pipeline", "a whole replica", "no other holders"],
)
def test_three_steps_are_bit_equal_wherever_masters_are(
    plan: Plan, stages: set[tuple[int, int]], dtype: str
):
    runtimes = runtime_of(plan, dtype), runtime_of(offloaded(plan, stages), dtype)
    with fully_optimised():  # as in a real run: the compiler's freedom is the danger
        for state in (s for runtime in runtimes for s in runtime.stages.values()):
            assert state.updates.stack_updates
    assert_equal(*map(trained, runtimes))


@pytest.mark.parametrize(
    "options",
    draws([{"state_bits": 8}, {"name": "adafactor"}, AVERAGED_MUON], short=1),
    ids=["8 bits", "adafactor", "averaged muon"],
)
def test_every_rule_is_bit_equal_there(options: dict[str, Any]):
    expected = trained(runtime_of(PLAN, **options))
    found = trained(runtime_of(offloaded(PLAN, {(0, 0), (1, 0)}), **options))
    assert_equal(found, expected)


def test_a_stage_that_is_cut_alone_differs_by_the_compilers_rounding_only(
    monkeypatch: pytest.MonkeyPatch,
):
    # An update without shared weights is not compiled for exact arithmetic by default:
    # its rounding then depends on its cuts.
    monkeypatch.setattr(UpdatePrograms, "_exact_arithmetic", lambda *_: EXACT)
    expected = trained(runtime_of(CUT))
    assert_equal(trained(runtime_of(offloaded(CUT, {(0, 0)}))), expected)


def test_state_moves_to_the_host_and_back_bit_for_bit():
    here, there = runtime_of(PLAN), runtime_of(offloaded(PLAN, ALL))
    state = trained(here, range(2))
    there.restore(lambda entry: state[entry.name])
    moved = trained(there, range(2, 3))
    assert_equal(moved, trained(here, range(2, 3)))
    here.restore(lambda entry: moved[entry.name])
    assert_equal(trained(here, range(3, 4)), trained(there, range(3, 4)))


def test_a_skipped_step_changes_nothing_there():
    runtime = runtime_of(offloaded(PLAN, ALL))
    before = trained(runtime, range(1))
    for state in runtime.stages.values():
        assert state.updates.skipped(state.opt_state) is not None
    assert_equal({e.name: np.array(v) for e, v in runtime.entries()}, before)
