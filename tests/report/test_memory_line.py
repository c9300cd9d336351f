# SPDX-License-Identifier: Apache-2.0
"""The line on how sure memory is names the fullest device, and what is known of it."""

from collections.abc import Mapping
from math import inf

import pytest

from hetjax.costs.costs import Costs, StageMemory
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.report.certainty import memory_lines
from hetjax.schedule.predicted import Predicted
from hetjax.schedule.programs.action import UNTIED
from hetjax.schedule.simulation.result import Simulation

GIB = 2**30
SMALL = StageMemory(workspace_bytes=GIB)
STEP = Simulation(step_time_s=1.0, lanes={}, shares={}, reductions=(), messages={})


def line_of(predicted: Predicted) -> str | None:
    return next(memory_lines(predicted), None)


def predicted(
    kinds: Mapping[str, str],
    memory: StageMemory,
    has_gib: float = 20.0,
    compiled: frozenset[tuple[int, int]] = frozenset(),
) -> Predicted:
    """Return a plan with a replica of one stage on each node; `kinds` by node."""
    replicas = tuple(
        Replica(
            num_microbatches=1,
            microbatch_size=1,
            stages=(Stage(node=node, devices=(0,), layers=(0, 2), launch_ahead=1),),
        )
        for node in kinds
    )
    plan = Plan(model="m", seq_len=8, global_batch=len(kinds), replicas=replicas)
    keys = [(r, 0) for r in range(len(kinds))]
    costs = Costs(
        times={},
        memory=dict.fromkeys(keys, memory),
        memory_bytes={key: has_gib * GIB * (1 + key[0]) for key in keys},
        compiled=compiled,
        devices=dict(zip(keys, kinds.values(), strict=True)),
    )
    return Predicted(
        plan=plan, costs=costs, simulation=STEP, tied=UNTIED, times_from=""
    )


def test_the_fullest_device_is_named_though_fewer_stages_were_compiled_for_another():
    sizes = StageMemory(static_bytes=8 * GIB, workspace_bytes=8 * GIB)
    line = line_of(predicted({"gpu-0": "H20", "cpu-0": "cpu"}, sizes))
    # 8 GiB, and 0.601 to 0.934 times 8 GiB: `test_memory_certainty.py` has the shares
    assert line is not None and line.startswith("how sure is memory: gpu-0/0 uses 12.8")
    assert " GiB (90%) and fits with a probability of 99%; " in line
    assert line.endswith(" stages compiled for GPUs")


def test_what_the_compiler_reported_is_said_to_be_so():
    compiled = frozenset({(0, 0)})
    line = line_of(predicted({"a": "H20"}, SMALL, compiled=compiled))
    assert line == "how sure is memory: the compiler reported the workspace of a/0"


def test_nothing_is_said_of_fitting_into_unknown_memory_nor_of_unknown_kinds():
    line = line_of(predicted({"a": "H20"}, SMALL, has_gib=inf))
    assert line is not None and "fits" not in line
    assert line_of(predicted({}, SMALL)) is None


@pytest.mark.parametrize(
    ("has_gib", "chance"), [(10.5, "99%"), (9.7, "7"), (8.7, "1%")]
)
def test_a_device_that_may_be_too_small_has_its_chance(has_gib: float, chance: str):
    sizes = StageMemory(static_bytes=8 * GIB, workspace_bytes=2 * GIB)
    line = line_of(predicted({"a": "H20"}, sizes, has_gib=has_gib))
    assert line is not None and f"a probability of {chance}" in line


def test_an_update_that_takes_more_than_any_pass_is_exact():
    sizes = StageMemory(static_bytes=8 * GIB, workspace_bytes=GIB, update_bytes=4 * GIB)
    found = predicted({"a": "H20"}, sizes).memory_certainty["a/0"]
    assert found.low_bytes == found.high_bytes == 12 * GIB
    assert found.fits is not None and found.fits > 0.99
    small = predicted({"a": "H20"}, sizes, has_gib=11.9).memory_certainty["a/0"]
    assert small.fits == 0
