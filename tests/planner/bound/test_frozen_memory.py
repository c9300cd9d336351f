# SPDX-License-Identifier: Apache-2.0
"""Plans of partly trained models in the least memory that holds them: the bound
excludes none of them, and a search finds a plan."""

from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.errors import NoFeasiblePlan
from hetjax.models.decoders import LlamaConfig, llama_model
from hetjax.models.finetuning import LoraConfig, TrainConfig, fine_tuned
from hetjax.models.model import Model
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.request import REMATS, PlanRequest
from hetjax.planner.model.templates import column
from hetjax.planner.model.terms import memory_terms
from hetjax.planner.model.terms.terms import bound_problem
from hetjax.planner.search.find import find_plan
from hetjax.plans.plan import Plan, Remat
from tests.planner.bound_checks import template_of
from tests.planner.near_plans import Proof
from tests.planner.wide_space import random_plan
from tests.short_runs import draws

TRAINED = ("head", "block_002", "block_001|head", "attention", "embedding", None)
LORA = (LoraConfig(), LoraConfig(rank=4), LoraConfig(rank=4, frozen="nf4"))
SEEDS, NUM_PLANS = range(24), 4
_PRECISE = 1.001


def model_of(r: Random) -> Model:
    model = llama_model(
        LlamaConfig(
            name="small",
            vocab_size=r.choice([64, 512]),
            hidden_size=64,
            inner_size=128,
            num_blocks=r.choice([3, 12]),
            num_heads=4,
            num_kv_heads=4,
            max_seq_len=64,
            tied=r.random() < 0.3,
        )
    )
    only = r.choice(TRAINED)
    lora = r.choice(LORA) if only is None else LORA[0]
    return fine_tuned(model, TrainConfig(only=only), lora)


def request_of(seed: int, memory_gib: float) -> PlanRequest:
    r = Random(f"frozen {seed}")
    count, num_nodes = r.choice([(1, 1), (2, 1), (1, 2)])
    node = Node(
        name="",
        device="made-up",
        count=count,
        peak_tflops=0.1,
        memory_gib=memory_gib,
        memory_gb_per_s=50.0,
        intra_node_gb_per_s=5.0,
        network_gbit_per_s=5.0,
    )
    nodes = tuple(replace(node, name=f"n{n}") for n in range(num_nodes))
    remats: tuple[Remat, ...] = r.choice([("none",), ("full",), REMATS])
    return PlanRequest(
        model=model_of(r),
        cluster=Cluster(name="small", nodes=nodes),
        seq_len=64,
        global_batch=4,
        dtype=r.choice(["float32", "bfloat16"]),
        microbatch_sizes=r.choice([(1,), (4,), (1, 2)]),
        tensor_degrees=(1,),
        data_degrees=(1,),
        remats=remats,
    )


def fits(seed: int, plan: Plan, memory_gib: float) -> bool:
    try:
        evaluate_plan(request_of(seed, memory_gib), plan, climbs=False)
    except NoFeasiblePlan:
        return False
    return True


def least_gib(seed: int, plan: Plan) -> float:
    low, high = 1e-4, 1.0
    while high > low * _PRECISE:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fits(seed, plan, middle) else (middle, high)
    return high


def left_out(seed: int) -> list[str]:
    """Return the replicas that fit although the bound says that they do not."""
    found = []
    for n in range(NUM_PLANS):
        plan = random_plan(Random(f"{seed} {n}"), request_of(seed, 1.0))
        request = request_of(seed, least_gib(seed, plan))
        p = bound_problem(request, request.degrees)
        proof = Proof(request=request, problem=p, bound=None)
        for r, replica in enumerate(plan.replicas):
            template = template_of(proof, plan, r)
            most = column(p, template, "prefix").memory_microbatches
            if most < replica.num_microbatches:
                found.append(f"plan {n}, replica {r}")
    return found


@pytest.mark.parametrize("seed", draws(SEEDS, short=4))
def test_no_replica_that_fits_is_left_out_of_the_bound(seed: int) -> None:
    assert not left_out(seed)


@pytest.mark.nightly
def test_what_layers_before_the_first_trained_one_keep_shows() -> None:
    with patch.object(memory_terms, "first_trained", lambda model: 0):
        assert any(left_out(seed) for seed in SEEDS)


@pytest.mark.parametrize("seed", draws(SEEDS, short=2))
def test_a_search_finds_a_plan_where_another_fits_easily(seed: int) -> None:
    """The search's templates ask for up to a third more memory than some plans need."""
    plan = random_plan(Random(f"{seed} 0"), request_of(seed, 1.0))
    roomy = request_of(seed, 1.35 * least_gib(seed, plan))
    assert find_plan(roomy, local_work=500).best.simulation.step_time_s > 0
