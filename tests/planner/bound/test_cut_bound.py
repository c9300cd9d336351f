# SPDX-License-Identifier: Apache-2.0
"""What crosses a cut of the network in simulated plans, against what the bound claims.

Owns requests with slow links: one to four zones, links between two nodes, measured
links, whole models and adapters, tied heads, frozen parts. Each claim of the derivation
in `model/network_cuts.py` is checked against simulated plans, and so is the bound as a
whole. Faults injected on purpose must show.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import combinations
from math import prod
from random import Random
from unittest.mock import patch

import pytest

from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.costs.measured.layer_profile import LinkMeasurement, Profile
from hetjax.models.decoders import LlamaConfig, llama_model
from hetjax.models.finetuning import LoraConfig, TrainConfig, fine_tuned
from hetjax.models.model import Model, abstract_params
from hetjax.planner.bound import cut_bound
from hetjax.planner.bound.busy_bound import busy_bound_s
from hetjax.planner.bound.certificate import proved
from hetjax.planner.bound.column_generation import lower_bound
from hetjax.planner.model import network_cuts
from hetjax.planner.model.evaluator import evaluate_plan
from hetjax.planner.model.network_cuts import Cut, cuts_of, trained_elements
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.terms.split_terms import split_bound_problem
from hetjax.planner.model.terms.terms import bound_problem
from hetjax.planner.search.in_parts import in_parts
from hetjax.plans.plan import Plan, StageMesh
from hetjax.schedule.bound import ROUNDING
from tests.planner.near_plans import without_memory
from tests.planner.wide_space import (
    AMPLE_GIB,
    Seat,
    changed,
    plan_of,
    random_plan,
    replica_of,
)
from tests.short_runs import draws

NUM_PLANS, NUM_CHANGES = 8, 5  # per request, and per plan
SEEDS = range(40)
_SEQ_LEN, _VOCAB = 16, 64


def slow_request(seed: int) -> PlanRequest:
    """Return a request whose links are so slow that computing hardly takes time."""
    r = Random(f"slow {seed}")
    zones = ["a", "b", "c", "d"][: r.choice([1, 2, 2, 3, 4])]
    nodes: list[Node] = []
    for zone in zones:
        like = Node(
            name="",
            device=f"made-up-{r.choice(zones)}",
            count=r.randint(1, 3),
            zone=zone if len(zones) > 1 else "",
            peak_tflops=10.0,
            memory_gib=AMPLE_GIB,
            memory_gb_per_s=1000.0,
            intra_node_gb_per_s=r.choice([0.01, 10.0]),
            network_gbit_per_s=r.choice([1e-4, 10.0]),
        )
        for n in range(r.randint(1, 3 if len(zones) < 3 else 2)):
            nodes.append(replace(like, name=f"{zone}{n}"))
    model = _model(r)
    return PlanRequest(
        model=model,
        cluster=Cluster(
            name=f"slow-{seed}", nodes=tuple(nodes), links=_links(r, nodes, zones)
        ),
        seq_len=_SEQ_LEN,
        global_batch=r.choice([1, 2, 8, 24]),
        dtype="float32",
        profile=_measured(r, model, nodes),
        microbatch_sizes=(1,),
        tensor_degrees=(1, 2),
        data_degrees=(1,),
        remats=("none",),
        unequal_tensor=True,
        gradient_wire=r.choice(["float32", "bfloat16"]),
    )


def _model(r: Random) -> Model:
    model = _llama(num_blocks=r.randint(2, 5), tied=r.random() < 0.5, vocab_size=_VOCAB)
    only = r.choice([None, None, None, "head", "block_001", "attention"])
    rank = r.choice([0, 0, 0, 4]) if only is None else 0
    return fine_tuned(model, TrainConfig(only=only), LoraConfig(rank=rank))


def _llama(*, num_blocks: int, tied: bool, vocab_size: int) -> Model:
    return llama_model(
        LlamaConfig(
            name="small",
            vocab_size=vocab_size,
            hidden_size=32,
            inner_size=64,
            num_blocks=num_blocks,
            num_heads=2,
            num_kv_heads=2,
            max_seq_len=_SEQ_LEN,
            tied=tied,
        )
    )


def _links(r: Random, nodes: list[Node], zones: list[str]) -> tuple[Link, ...]:
    """Return links between all zones, and between some nodes."""
    ends = list(combinations(zones, 2))
    pairs = list(combinations([node.name for node in nodes], 2))
    ends += r.sample(pairs, min(r.choice([0, 0, 1, 2]), len(pairs)))
    return tuple(
        Link(
            between=pair,
            bandwidth_gbit_per_s=1e-4 * 100 ** r.random(),
            latency_ms=0.001,
        )
        for pair in ends
    )


def _measured(r: Random, model: Model, nodes: list[Node]) -> Profile | None:
    """Return some measured links without layers, or None."""
    pairs = list(combinations([node.name for node in nodes], 2))
    if not pairs or r.random() < 0.7:
        return None
    ways = [way for a, b in r.sample(pairs, 1) for way in ((a, b), (b, a))]
    return Profile(
        model=model.name,
        seq_len=_SEQ_LEN,
        dtype="float32",
        layers=("block",) * len(model.layers),
        measurements=(),
        links=tuple(
            LinkMeasurement(
                between=way,
                bandwidth_gbit_per_s=1e-4 * 100 ** r.random(),
                latency_ms=0.001,
            )
            for way in ways
        ),
    )


def step_s_of(request: PlanRequest, plan: Plan, schedule: str = "h1f1b") -> float:
    with without_memory():
        found = evaluate_plan(request, plan, schedule, climbs=False, forms="usual")
    return found.simulation.step_time_s


def plans_near(r: Random, request: PlanRequest) -> Iterator[tuple[Plan, float]]:
    """Yield a random plan, and plans that small changes make faster."""
    plan = random_plan(r, request)
    best_s = step_s_of(request, plan)
    yield plan, best_s
    for _ in range(NUM_CHANGES):
        other = changed(r, request, plan)
        if other is None:
            continue
        other_s = step_s_of(request, other)
        yield other, other_s
        if other_s < best_s:
            plan, best_s = other, other_s


def contradictions(seed: int, num_plans: int = NUM_PLANS) -> Iterator[str]:
    """Yield each contradiction between plans of a request and its cuts or bound."""
    request = slow_request(seed)
    cuts, bound_s = cut_bound.cuts_of(request), proved(request).step_s
    shared_s = proved(request, space="interleaved").step_s
    assert bound_s is not None and shared_s is not None
    for n in range(num_plans):
        for plan, step_s in plans_near(Random(f"{seed} {n}"), request):
            for cut in cuts:
                yield from _of_cut(request, plan, step_s, cut)
            if step_s < bound_s * (1 - ROUNDING):
                yield f"{seed}: takes {step_s}, the bound is {bound_s}"
            in_parts_s = step_s
            if (cut_up := in_parts(plan, 2)) is not None:
                in_parts_s = min(step_s, step_s_of(request, cut_up, "searched"))
            if in_parts_s < shared_s * (1 - ROUNDING):
                yield f"{seed}: in parts {in_parts_s}, the bound is {shared_s}"


def _of_cut(request: PlanRequest, plan: Plan, step_s: float, cut: Cut) -> Iterator[str]:
    inside = {n.name for c in cut.side for n in request.classes[c].nodes}
    crossing, sides = 0, [set[bool]() for _ in request.model.layers]
    for replica in plan.replicas:
        held = {stage.node in inside for stage in replica.stages}
        crossing += replica.microbatch_size * replica.num_microbatches * (len(held) > 1)
        for stage in replica.stages:
            for layer in range(*stage.layers):
                sides[layer].add(stage.node in inside)
    mixed = {at for at, found in enumerate(sides) if len(found) == 2}
    crossing_bytes = cut.bytes_per_s * step_s * (1 + 1e-6)
    found_bytes = crossing * cut.message_bytes
    each_bytes = {"float32": 4, "bfloat16": 2}[request.gradient_wire]
    found_bytes += each_bytes * summed_elements(request.model, mixed)
    if found_bytes > crossing_bytes:
        yield f"{found_bytes} bytes cross, and {crossing_bytes} can"
    alone = {next(iter(found)) for found in sides if len(found) == 1}
    if len(alone) == 2 and crossing < request.global_batch:
        yield f"{crossing} sequences cross of {request.global_batch}"
    if len(alone) == 2 and step_s * (1 + 1e-6) < cut.crossing_s:
        yield f"all sequences cross in {step_s} s, not in {cut.crossing_s}"
    elements = network_cuts.trained_elements(request.model)
    for home in {True, False} if not alone else alone if len(alone) == 1 else ():
        done = sum(
            r.microbatch_size * r.num_microbatches * elements[layer] / sum(elements)
            for r in plan.replicas
            for stage in r.stages
            for layer in range(*stage.layers)
            if (stage.node in inside) is not home
        )
        if done > cut.most_sequences(step_s) * (1 + 1e-6):
            yield f"does {done} sequences of {cut.most_sequences(step_s)}"


def summed_elements(model: Model, mixed: set[int]) -> int:
    """Return the trained elements that these layers hold, each counted once."""
    held: dict[str, int] = {}
    for at in mixed:
        for module in model.layers[at].modules:
            paths = dict(module.tied)
            for owner in (module, model.layers[0].modules[0]):
                for name, param in abstract_params(owner.unquantised).items():
                    path = f"{owner.path}.{name}"
                    if param.trained and (owner is module or path in paths.values()):
                        held[path] = prod(param.shape)
    return sum(held.values())


@pytest.mark.parametrize("seed", draws(SEEDS, short=6))
def test_no_plan_contradicts_what_crosses_a_cut(seed: int) -> None:
    assert not list(contradictions(seed))


@pytest.mark.parametrize("seed", [1, 15, 25])
def test_cuts_make_bounds_better(seed: int) -> None:
    """Otherwise a bound that ignores cuts would pass."""
    request = slow_request(seed)
    found_s = lower_bound(bound_problem(request, request.degrees), "prefix").step_s
    better_s = proved(request).step_s
    assert better_s is not None and better_s > 1.9 * found_s


@pytest.mark.parametrize("seed", [15, 25, 32])
def test_cuts_make_the_bound_of_devices_that_never_wait_better(seed: int) -> None:
    request = slow_request(seed)
    busy_s = busy_bound_s(split_bound_problem(request, request.degrees)[0])
    better_s = proved(request, space="interleaved").step_s
    assert better_s is not None and better_s > 1.7 * busy_s


@pytest.mark.parametrize("global_batch", [16, 64])
@pytest.mark.parametrize("ends", ["ab", "aba"])
def test_where_all_cross_a_step_is_hardly_longer_than_that_takes(
    ends: str, global_batch: int
) -> None:
    """The head shares the embedding's table, which is summed across the link unless the
    head's stage sits beside it. The cheaper plan is close to the bound."""
    node = Node(
        name="a",
        device="made-up",
        count=2,
        zone="east",
        peak_tflops=10.0,
        memory_gib=AMPLE_GIB,
        memory_gb_per_s=1000.0,
        intra_node_gb_per_s=10.0,
        network_gbit_per_s=10.0,
    )
    link = Link(between=("east", "west"), bandwidth_gbit_per_s=1e-2, latency_ms=0.001)
    request = PlanRequest(
        model=_llama(num_blocks=2, tied=True, vocab_size=512),
        cluster=Cluster(
            name="two",
            nodes=(node, replace(node, name="b", zone="west")),
            links=(link,),
        ),
        seq_len=_SEQ_LEN,
        global_batch=global_batch,
        dtype="float32",
        microbatch_sizes=(1,),
        tensor_degrees=(1,),
        data_degrees=(1,),
        remats=("none",),
    )
    seats = [
        Seat(node=end, devices=(n // 2,), mesh=StageMesh(), remat="none")
        for n, end in enumerate(ends)
    ]
    cuts = [(0, 2), (2, 4)] if len(ends) == 2 else [(0, 1), (1, 3), (3, 4)]
    plan = plan_of(request, [replica_of(global_batch, 1, seats, cuts)])
    (cut,) = cuts_of(request)
    share = step_s_of(request, plan) / cut.crossing_s
    is_cheaper = (cut.tied_bytes < global_batch * cut.message_bytes) == (ends == "ab")
    assert 1 <= share and (share < 1.15) == is_cheaper


def test_elements_count_once_over_all_layers() -> None:
    for seed in SEEDS:
        model = slow_request(seed).model
        each = summed_elements(model, set(range(len(model.layers))))
        assert sum(trained_elements(model)) == pytest.approx(each)


def _changed(**changes: float) -> AbstractContextManager[object]:
    """Patch the cuts so that these figures are multiplied by the given factors."""

    def faulty(request: PlanRequest) -> list[Cut]:
        found = cuts_of(request)
        return [
            replace(
                cut, **{name: getattr(cut, name) * by for name, by in changes.items()}
            )
            for cut in found
        ]

    return patch.object(cut_bound, "cuts_of", faulty)


def _without_own_links(network: Cluster, one: set[str], other: set[str]) -> float:
    nodes = {node.name for node in network.nodes}
    return 0.0 if one & nodes else _LINKS_BYTES_PER_S(network, one, other)


def _tied_twice(model: Model) -> list[float]:
    """Count tied elements in full for each layer that holds them."""
    first, *others = model.layers
    tied = {
        path for layer in others for module in layer.modules for _, path in module.tied
    }
    found = trained_elements(model)
    held = abstract_params(first.modules[0].unquantised)
    each = sum(prod(held[path.rpartition(".")[2]].shape) for path in tied)
    return [found[0] + each / 2, *found[1:-1], found[-1] + each / 2]


_LINKS_BYTES_PER_S = network_cuts._links_bytes_per_s  # pyright: ignore
FAULTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "messages twice": lambda: _changed(message_bytes=2.0),
    "sums twice": lambda: _changed(gradient_bytes=2.0),
    "half the links": lambda: _changed(bytes_per_s=0.5),
    "no links between nodes": lambda: patch.object(
        network_cuts, "_links_bytes_per_s", _without_own_links
    ),
    "tied elements twice": lambda: patch.object(
        network_cuts, "trained_elements", _tied_twice
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_what_crosses_show_in_plans(fault: str) -> None:
    with FAULTS[fault]():
        assert any(next(contradictions(seed), None) for seed in SEEDS)
