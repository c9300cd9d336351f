# SPDX-License-Identifier: Apache-2.0
"""Plans for a node of two hosts with two devices each, and a node of one host."""

from typing import Any

from hetjax.cluster.cluster import Node
from hetjax.models.decoders import GPTConfig, LlamaConfig, gpt_model, llama_model
from hetjax.models.model import Model
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh
from tests.runtime.random_plans import SEQ_LEN, Case

SLICE = Node(name="slice", device="cpu", count=4, hosts=2)
SINGLE = Node(name="single", device="cpu", count=2)
NODES = (SLICE, SINGLE)
WORKERS = (*SLICE.workers, *SINGLE.workers)
_SIZES: dict[str, Any] = dict(
    vocab_size=128, hidden_size=16, num_blocks=2, num_heads=4, max_seq_len=SEQ_LEN
)
TIED = gpt_model(GPTConfig(name="gpt", **_SIZES))  # first and last layer share a table
UNTIED = llama_model(LlamaConfig(name="llama", inner_size=32, num_kv_heads=4, **_SIZES))


def spanning_case(name: str) -> Case:
    """Return the case of this name in `CASES`."""
    model, schedule, replicas = CASES[name]
    plan = Plan(
        model=model.name,
        seq_len=SEQ_LEN,
        global_batch=sum(r.num_microbatches * r.microbatch_size for r in replicas),
        schedule=schedule,
        replicas=replicas,
    )
    return Case(model, plan, SLICE.count + SINGLE.count)


def _stage(
    node: Node,
    devices: tuple[int, ...],
    layers: tuple[int, int],
    *,
    data: int = 1,
    ahead: int = 1,
) -> Stage:
    mesh = StageMesh(data=data, tensor=len(devices) // data)
    return Stage(
        node=node.name,
        devices=devices,
        mesh=mesh,
        layers=layers,
        launch_ahead=ahead,
        remat="selective" if ahead > 1 else "none",
    )


def _replica(*stages: Stage, microbatches: int = 3) -> Replica:
    return Replica(
        num_microbatches=microbatches, microbatch_size=4, stages=tuple(stages)
    )


_AHEAD = 2
_Case = tuple[Model, str, tuple[Replica, ...]]
CASES: dict[str, _Case] = {
    # each data rank on its own host; tied to the last stage, which is on the other node
    "data": (
        TIED,
        "1f1b",
        (
            _replica(
                _stage(SLICE, (0, 1, 2, 3), (0, 2), data=2, ahead=_AHEAD),
                _stage(SINGLE, (0, 1), (2, 4), data=2),
            ),
        ),
    ),
    # each row of the last stage is on both hosts; split backward passes
    "tensor": (
        UNTIED,
        "zero-bubble",
        (
            _replica(
                _stage(SINGLE, (0,), (0, 1), ahead=_AHEAD),
                _stage(SLICE, (0, 1, 2, 3), (1, 4)),
            ),
        ),
    ),
    # both axes span hosts; a node of one host shares the segments
    "replicas": (
        TIED,
        "1f1b",
        (
            _replica(_stage(SLICE, (0, 2, 3, 1), (0, 4), data=2), microbatches=2),
            _replica(
                _stage(SINGLE, (1,), (0, 2)),
                _stage(SINGLE, (0,), (2, 4)),
                microbatches=1,
            ),
        ),
    ),
    # each stage in one host of the same node; they pass activations to each other
    "hosts": (
        UNTIED,
        "1f1b",
        (
            _replica(
                _stage(SLICE, (0, 1), (0, 2), data=2, ahead=_AHEAD),
                _stage(SLICE, (3, 2), (2, 4)),
            ),
        ),
    ),
    # two stages on the same four devices, with a stage of the other node in between
    "chunks": (
        UNTIED,
        "interleaved",
        (
            _replica(
                _stage(SLICE, (0, 1, 2, 3), (0, 1), data=2, ahead=3),
                _stage(SINGLE, (0,), (1, 3), ahead=2),
                _stage(SLICE, (0, 1, 2, 3), (3, 4), data=2),
            ),
        ),
    ),
    # a host without a stage
    "idle": (
        UNTIED,
        "1f1b",
        (
            _replica(
                _stage(SLICE, (2, 3), (0, 2), ahead=_AHEAD),
                _stage(SINGLE, (1,), (2, 4)),
            ),
        ),
    ),
}
