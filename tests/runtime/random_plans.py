# SPDX-License-Identifier: Apache-2.0
"""Random models and plans for the "same numbers" invariant, a function of a seed."""

import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from hetjax.models.counts import tensor_sizes
from hetjax.models.gpt import GPTConfig, gpt_model
from hetjax.models.llama import LlamaConfig, llama_model
from hetjax.models.model import Model
from hetjax.models.moe import Routing
from hetjax.plans.plan import LayerRange, Plan, Replica, Stage, StageMesh

MAX_DEVICES = 16
SEQ_LEN = 8


@dataclass(frozen=True)
class Case:
    model: Model
    plan: Plan
    num_devices: int


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
    return llama_model(
        LlamaConfig(
            **shared,
            inner_size=32,
            num_kv_heads=rng.choice([2, 4]),
            routing=routing,
        )
    )


def random_cuts(rng: random.Random, num_layers: int, num_stages: int):
    cuts = sorted(rng.sample(range(1, num_layers), num_stages - 1))
    return list(zip([0, *cuts], [*cuts, num_layers], strict=True))


def random_replica(
    rng: random.Random, num_layers: int, free: int, max_tensor: int
) -> Replica:
    """A replica on nodes of its own choice, at most `free` devices."""
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


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    model = random_model(rng, ["gpt", "llama", "moe"][seed % 3])
    max_tensor = min(min(sizes) for sizes in tensor_sizes(model).values())
    replicas, used = [], 0
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        if used < MAX_DEVICES:
            free = MAX_DEVICES - used
            replica = random_replica(rng, len(model.layers), free, max_tensor)
            replica, used = place(replica, used, rng)
            replicas.append(replica)
    plan = Plan(
        model=model.name,
        seq_len=SEQ_LEN,
        global_batch=sum(r.num_microbatches * r.microbatch_size for r in replicas),
        schedule=rng.choice(["1f1b", "gpipe"]),
        replicas=tuple(replicas),
    )
    return Case(model, plan, used)


def place(replica: Replica, used: int, rng: random.Random) -> tuple[Replica, int]:
    """Put the stages on the next devices of two nodes that share the 16 devices."""
    stages = []
    for stage in replica.stages:
        size = len(stage.devices)
        node = rng.choice(["even", "odd"])
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
