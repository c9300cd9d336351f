# SPDX-License-Identifier: Apache-2.0
"""Random models and plans, a function of a seed, for the "same numbers" invariant."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from hetjax.costs.costs import Costs, Route, StageTimes
from hetjax.models.decoders import GPTConfig, LlamaConfig, gpt_model, llama_model
from hetjax.models.experts.moe import Routing
from hetjax.models.model import Model, tensor_sizes
from hetjax.plans.plan import (
    AttentionForm,
    LayerRange,
    Plan,
    Replica,
    Stage,
    StageMesh,
    reduce_groups,
)
from hetjax.plans.schedules import SCHEDULES
from hetjax.schedule.programs.action import Action, Op, StageKey, format_program
from hetjax.schedule.programs.generate import by_stage, lane_orders
from hetjax.schedule.programs.lower import communicate, finish, free, reduce
from hetjax.schedule.programs.merge import merge
from hetjax.schedule.search import searched
from hetjax.stage.partition import PlanPartition

MAX_DEVICES = 16
SEQ_LEN = 8


@dataclass(frozen=True)
class Case:
    model: Model
    plan: Plan
    num_devices: int


_MORE: dict[str, Any] = {  # features that relatives of Llama add
    "biases": "all",
    "mlp_biases": True,
    "rope_blocks": (True, False),
    "embedding_scale": 4.0,
    "residual_scale": 0.5,
    "query_scale": 0.3,
    "logit_divisor": 2.0,
    "tied": True,
}


def random_model(rng: random.Random, family: str) -> Model:
    grain: Literal["block", "half"] = rng.choice(["block", "block", "half"])
    shared: dict[str, Any] = dict(
        name=family,
        vocab_size=rng.choice([100, 128]),
        hidden_size=16,
        num_blocks=rng.choice([2, 2, 3]),
        num_heads=4,
        max_seq_len=SEQ_LEN,
        grain=grain,
    )
    if family == "gpt":
        return gpt_model(GPTConfig(**shared))
    routing = Routing(num_experts=4, top_k=2) if family == "moe" else None
    config = LlamaConfig(
        **shared, inner_size=32, num_kv_heads=rng.choice([2, 4]), routing=routing
    )
    if routing is None and config.num_kv_heads == 2:  # no draw: plans stay the same
        config = replace(config, **_MORE)
    return llama_model(config)


def random_cuts(rng: random.Random, num_layers: int, num_stages: int):
    cuts = sorted(rng.sample(range(1, num_layers), num_stages - 1))
    return list(zip([0, *cuts], [*cuts, num_layers], strict=True))


def random_replica(
    rng: random.Random, num_layers: int, free: int, max_tensor: int
) -> Replica:
    """Return a replica of at most `free` devices with randomly chosen nodes."""
    num_stages = min(rng.choice([1, 2, 2, 3, 4]), num_layers, free)
    meshes = []
    for s in range(num_stages):
        budget = free - sum(m.data * m.tensor for m in meshes) - (num_stages - s - 1)
        degrees = [t for t in (1, 2, 4) if t <= max_tensor]
        choices = [(d, t) for d in (1, 2) for t in degrees if d * t <= budget]
        data, tensor = rng.choice(choices)
        meshes.append(StageMesh(data=data, tensor=tensor))
    num_microbatches = rng.randint(1, 4)
    cuts = random_cuts(rng, num_layers, num_stages)
    aheads = accumulate(rng.choice([1, 1, 2]) for _ in meshes)
    stages = [
        _stage(rng, *fields)
        for fields in zip(meshes, cuts, [*aheads][::-1], strict=True)
    ]
    return Replica(
        num_microbatches=num_microbatches,
        microbatch_size=rng.choice(
            [2, 4] if any(m.data > 1 for m in meshes) else [1, 2, 3]
        ),
        stages=tuple(stages),
    )


def _stage(
    rng: random.Random, mesh: StageMesh, layers: LayerRange, launch_ahead: int
) -> Stage:
    return Stage(
        node="",
        devices=tuple(range(mesh.data * mesh.tensor)),
        mesh=mesh,
        layers=layers,
        remat=rng.choice(["none", "selective", "full"]),
        launch_ahead=launch_ahead,
    )


def random_case(seed: int, nodes: Sequence[str] = ("even", "odd")) -> Case:
    """Return a case on nodes of these names, which share the same 16 devices."""
    rng = random.Random(seed)
    model = random_model(rng, ["gpt", "llama", "moe"][seed % 3])
    max_tensor = min(min(sizes) for sizes in tensor_sizes(model).values())
    replicas, used = [], 0
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        if used < MAX_DEVICES:
            free = MAX_DEVICES - used
            replica = random_replica(rng, len(model.layers), free, max_tensor)
            replica, used = place(replica, used, rng, nodes)
            replicas.append(replica)
    plan = Plan(
        model=model.name,
        seq_len=SEQ_LEN,
        global_batch=sum(r.num_microbatches * r.microbatch_size for r in replicas),
        schedule=rng.choice(tuple(SCHEDULES)),
        replicas=tuple(replicas),
    )
    plan = _in_forms(plan, seed)
    if plan.schedule == "interleaved":
        shared = tuple(_on_fewer_devices(rng, replica) for replica in plan.replicas)
        plan = replace(plan, replicas=shared)
        if rng.random() < 0.5:
            plan = _searched(rng, plan, model)
    elif plan.schedule == "h1f1b":
        plan = _searched(rng, plan, model)
    elif plan.schedule != "zero-bubble" and rng.random() < 0.3:
        split = {(r, s) for r, s, _ in plan.stages() if rng.random() < 0.7}
        plan = with_split_backwards(plan, model, split)
    return Case(model, plan, used)


def _in_forms(plan: Plan, seed: int) -> Plan:
    """Return the plan with a random attention form, or none, for each stage."""
    rng = random.Random(f"attention {seed}")
    drawn: list[AttentionForm | None] = ["xla", "chunked", None]
    replicas = tuple(
        replace(
            replica,
            stages=tuple(
                replace(stage, attention=rng.choice(drawn)) for stage in replica.stages
            ),
        )
        for replica in plan.replicas
    )
    return replace(plan, replicas=replicas)


def interleaved_case() -> Case:
    """Return three chunks of a tied model on two groups, the middle with I and W."""
    config: Any = dict(hidden_size=16, num_blocks=2, num_heads=4, max_seq_len=SEQ_LEN)
    model = gpt_model(GPTConfig(name="gpt", vocab_size=100, **config))
    chunks = [("even", (0, 1)), ("odd", (2,)), ("even", (0, 1))]
    stages = tuple(
        Stage(
            node=node,
            devices=devices,
            mesh=StageMesh(data=len(devices)),
            layers=layers,
            launch_ahead=1,
        )
        for (node, devices), layers in zip(
            chunks, [(0, 1), (1, 3), (3, 4)], strict=True
        )
    )
    replica = Replica(num_microbatches=3, microbatch_size=2, stages=stages)
    plan = Plan(
        model="gpt",
        seq_len=SEQ_LEN,
        global_batch=6,
        schedule="gpipe",
        replicas=(replica,),
    )
    return Case(model, with_split_backwards(plan, model, {(0, 1)}), 3)


def with_split_backwards(plan: Plan, model: Model, stages: set[StageKey]) -> Plan:
    """Return the plan with I and W for backward on these stages, as explicit programs.

    W follows its I. Under GPipe, the Ws come after all microbatches, last first.
    """
    orders = {
        key: _split(order, delayed=plan.schedule == "gpipe") if key in stages else order
        for key, order in by_stage(lane_orders(plan)).items()
    }
    orders = reduce(
        communicate(orders), reduce_groups(plan, PlanPartition(plan, model).tied)
    )
    programs = merge(free(finish(orders)), plan)
    texts = {node: format_program(program) for node, program in programs.items()}
    return replace(plan, programs=texts)


def _on_fewer_devices(rng: random.Random, replica: Replica) -> Replica:
    """Return the replica with its later stages on the devices of its first stages."""
    num_lanes = rng.randint(1, len(replica.stages))
    stages = tuple(
        replace(stage, node=lane.node, devices=lane.devices, mesh=lane.mesh)
        for s, stage in enumerate(replica.stages)
        for lane in [replica.stages[s % num_lanes]]
    )
    return replace(replica, stages=stages)


def _searched(rng: random.Random, plan: Plan, model: Model) -> Plan:
    """Return the plan with programs searched for random times and limits."""
    times = {}
    for r, s, _ in plan.stages():
        f, i, w = (rng.uniform(0.2, 2.0) for _ in range(3))
        whole = rng.uniform(0.7, 1.0) * (i + w)  # two halves cost more
        times[r, s] = StageTimes(
            forward_s=f,
            backward_s=whole,
            fused_s=f + whole,
            input_gradient_s=i,
            weight_gradient_s=w,
        )
    edges = [((r, a), (r, b)) for r, a in times for q, b in times if r == q]
    routes = {edge: Route(trunks=(), latency_s=rng.uniform(0, 2)) for edge in edges}
    limits = {key: rng.randint(2, 4) for key in times}
    return searched(
        plan,
        Costs(times=times, routes=routes),
        limits,
        split_limits=limits if rng.random() < 0.7 else None,
        tied=PlanPartition(plan, model).tied,
    )


def _split(order: list[Action], delayed: bool) -> list[Action]:
    halves = {Op.B: [Op.I, Op.W], Op.FB: [Op.F, Op.I, Op.W]}
    split = [
        replace(action, op=op)
        for action in order
        for op in halves.get(action.op, [action.op])
    ]
    if not delayed:
        return split
    weights = [action for action in split if action.op is Op.W]
    return [action for action in split if action.op is not Op.W] + weights[::-1]


def place(
    replica: Replica, used: int, rng: random.Random, nodes: Sequence[str]
) -> tuple[Replica, int]:
    """Put the stages on the next devices of random nodes that share the 16 devices."""
    stages = []
    for stage in replica.stages:
        size = len(stage.devices)
        node = rng.choice(nodes)
        stages.append(
            Stage(
                node=node,
                devices=tuple(range(used, used + size)),
                mesh=stage.mesh,
                layers=stage.layers,
                remat=stage.remat,
                launch_ahead=stage.launch_ahead,
            )
        )
        used += size
    placed = Replica(
        num_microbatches=replica.num_microbatches,
        microbatch_size=replica.microbatch_size,
        stages=tuple(stages),
    )
    return placed, used
