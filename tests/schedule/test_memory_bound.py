# SPDX-License-Identifier: Apache-2.0
"""The memory bound and simulations without transfers, against full programs."""

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.costs.costs import Costs, Reduction, Route, StageMemory, StageTimes
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh, reduce_groups
from hetjax.schedule.programs.action import UNTIED, Tied
from hetjax.schedule.programs.lower import lower
from hetjax.schedule.simulated import is_plain, simulated
from hetjax.schedule.simulation.memory import memory_uses
from hetjax.schedule.simulation.memory_bound import most_bytes
from hetjax.schedule.simulation.simulator import simulate

_SEEDS = st.integers(0, 10**9)


def random_replica(rng: random.Random, devices: dict[str, int]) -> Replica:
    """Return stages on one to three nodes, each on its own devices.

    Launch-aheads do not rise from stage to stage.
    """
    num_stages, num_microbatches = rng.randint(1, 6), rng.randint(1, 12)
    aheads = sorted(rng.choices(range(1, 9), k=num_stages), reverse=True)
    stages = []
    for s, ahead in enumerate(aheads):
        node, data = rng.choice(["a", "b", "c"]), rng.choice([1, 2, 4])
        first, devices[node] = devices[node], devices[node] + data
        stages.append(
            Stage(
                node=node,
                devices=tuple(range(first, first + data)),
                mesh=StageMesh(data=data),
                layers=(s, s + 1) if s < num_stages - 1 else (s, 6),
                launch_ahead=ahead,
            )
        )
    return Replica(
        num_microbatches=num_microbatches, microbatch_size=4, stages=tuple(stages)
    )


def random_plan(rng: random.Random) -> Plan:
    devices = {"a": 0, "b": 0, "c": 0}
    replicas = tuple(random_replica(rng, devices) for _ in range(rng.randint(1, 3)))
    return Plan(
        model="m",
        seq_len=1,
        global_batch=sum(4 * r.num_microbatches for r in replicas),
        schedule=rng.choice(["1f1b", "h1f1b", "gpipe"]),
        replicas=replicas,
    )


def random_memory(rng: random.Random) -> StageMemory:
    sizes = [rng.choice([0, 1, 3, 10, 40]) for _ in range(6)]
    return StageMemory(
        static_bytes=sizes[0],
        saved_bytes=sizes[1],
        workspace_bytes=sizes[2],
        update_bytes=sizes[3],
        input_bytes=sizes[4],
        output_bytes=sizes[5],
    )


def above_programs(plan: Plan, costs: Costs) -> list[int]:
    """Return by how much the bound of each stage exceeds the need of its programs."""
    uses = memory_uses(lower(plan), plan, costs)
    return [
        most_bytes(plan, costs, r, s)
        - uses[f"{stage.node}/{stage.devices[0]}"].total_bytes
        for r, s, stage in plan.stages()
    ]


@settings(max_examples=300)
@given(_SEEDS)
def test_no_program_needs_more_than_the_bound(seed):
    rng = random.Random(seed)
    plan = random_plan(rng)
    assert is_plain(plan)
    memory = {(r, s): random_memory(rng) for r, s, _ in plan.stages()}
    assert min(above_programs(plan, Costs(times={}, memory=memory))) >= 0


@given(_SEEDS)
def test_the_bound_of_what_no_stage_sends_is_exact(seed):
    rng = random.Random(seed)
    plan = random_plan(rng)
    memory = {
        (r, s): replace(random_memory(rng), input_bytes=0, output_bytes=0)
        for r, s, _ in plan.stages()
    }
    assert set(above_programs(plan, Costs(times={}, memory=memory))) == {0}


def random_tied(rng: random.Random, plan: Plan) -> Tied:
    """Return either nothing, or a parameter that both ends of all pipelines hold."""
    ends = [
        (r, s)
        for r, each in enumerate(plan.replicas)
        for s in {0, len(each.stages) - 1}
    ]
    return rng.choice([UNTIED, {"embedding.table": tuple(sorted(ends))}])


def random_costs(rng: random.Random, plan: Plan, tied: Tied) -> Costs:
    """Return times, shared trunks and sums of all layers, to combine all features."""
    trunks = {name: rng.uniform(0.5, 4.0) for name in "tuv"}
    edges = [
        edge
        for r, s, _ in plan.stages()
        if s + 1 < len(plan.replicas[r].stages)
        for edge in (((r, s), (r, s + 1)), ((r, s + 1), (r, s)))
    ]
    return Costs(
        times={
            (r, s): StageTimes(
                forward_s=rng.uniform(0.1, 1),
                backward_s=rng.uniform(0.1, 2),
                fused_s=rng.uniform(0.1, 3),
                update_s=rng.uniform(0, 1),
            )
            for r, s, _ in plan.stages()
        },
        trunks=trunks,
        routes={
            edge: Route(
                trunks=tuple(rng.sample(sorted(trunks), k=rng.randint(0, 2))),
                latency_s=rng.uniform(0, 0.2),
            )
            for edge in edges
        },
        message_bytes={edge: rng.uniform(0, 2) for edge in edges},
        reductions={
            group: Reduction(
                trunk_bytes={name: rng.uniform(0, 9) for name in rng.sample("tuv", 2)},
                latency_s=rng.uniform(0, 0.2),
            )
            for group in reduce_groups(plan, tied)
        },
        norm_s=0.05,
    )


@given(_SEEDS)
def test_a_simulation_needs_no_transfers_in_the_programs(seed):
    rng = random.Random(seed)
    plan = random_plan(rng)
    tied = random_tied(rng, plan)
    costs = random_costs(rng, plan, tied)
    assert simulated(plan, costs, tied) == simulate(lower(plan, tied), plan, costs)
