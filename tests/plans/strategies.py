# SPDX-License-Identifier: Apache-2.0
"""Random plans for property tests: valid ones with their cluster, and arbitrary ones.

Owns the drawing, and small changes to a plan. Does not own what is valid
(`hetjax/plans/validation.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from hypothesis import strategies as st

from hetjax.cluster.catalogue import Precision
from hetjax.cluster.cluster import Cluster, Node
from hetjax.names import is_node
from hetjax.plans.plan import Offload, Plan, Prediction, Replica, Stage, StageMesh
from hetjax.plans.validation import validate_plan

REMATS = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A plan with the cluster and the model figures for which it is valid."""

    plan: Plan
    cluster: Cluster
    num_layers: int
    tensor_sizes: Mapping[str, frozenset[int]]
    max_seq_len: int


def validate(case: Case, plan: Plan) -> None:
    """Validate a plan for the cluster and the model of the case."""
    validate_plan(
        plan, case.cluster, case.num_layers, case.tensor_sizes, case.max_seq_len
    )


def with_replica(plan: Plan, r: int, **changes: Any) -> Plan:
    """Return the plan with fields of one replica changed."""
    replicas = list(plan.replicas)
    replicas[r] = replace(replicas[r], **changes)
    return replace(plan, replicas=tuple(replicas))


def with_stage(plan: Plan, r: int, s: int, **changes: Any) -> Plan:
    """Return the plan with fields of one stage changed."""
    stages = list(plan.replicas[r].stages)
    stages[s] = replace(stages[s], **changes)
    return with_replica(plan, r, stages=tuple(stages))


@st.composite
def clusters(draw: st.DrawFn, max_nodes: int = 4, max_count: int = 9) -> Cluster:
    """Draw uneven nodes of any kinds."""
    counts = draw(st.lists(st.integers(1, max_count), min_size=1, max_size=max_nodes))
    nodes = [
        Node(name=f"n{i}", device=draw(st.sampled_from(["H20", "T4"])), count=count)
        for i, count in enumerate(counts)
    ]
    return Cluster(name="random", nodes=tuple(nodes))


@st.composite
def valid_cases(
    draw: st.DrawFn,
    max_replicas: int = 3,
    max_stages: int = 4,
    max_layers: int = 12,
) -> Case:
    """Draw unlike replicas (cuts, degrees, depths, batches) on made-to-measure nodes.

    Every stage takes its devices, in any order, from one of three nodes.
    """
    num_layers = draw(st.integers(max_stages, max_layers))
    free = {f"n{i}": 0 for i in range(3)}
    schedule = draw(st.sampled_from(["1f1b", "gpipe"]))
    replicas = []
    for _ in range(draw(st.integers(1, max_replicas))):
        num_stages = draw(st.integers(1, max_stages))
        inner = st.lists(
            st.integers(1, num_layers - 1),
            min_size=num_stages - 1,
            max_size=num_stages - 1,
            unique=True,
        )
        cuts = [0, *sorted(draw(inner)), num_layers]
        ahead = draw(
            st.lists(st.integers(1, 8), min_size=num_stages, max_size=num_stages)
        )
        ahead.sort(reverse=True)
        stages = [
            _stage(draw, free, (lo, hi), launch_ahead)
            for lo, hi, launch_ahead in zip(cuts, cuts[1:], ahead, strict=False)
        ]
        replica = Replica(
            num_microbatches=draw(st.integers(1, 5)),
            microbatch_size=2 * draw(st.integers(1, 2)),
            stages=tuple(stages),
        )
        replicas.append(replica)
    nodes = []
    for name, used in free.items():
        if used:
            count = used + draw(st.integers(0, 2))
            hosts = draw(st.sampled_from([1, count]))
            nodes.append(Node(name=name, device="cpu", count=count, hosts=hosts))
    seq_len = draw(st.integers(1, 64))
    plan = Plan(
        model="random",
        seq_len=seq_len,
        global_batch=sum(r.num_microbatches * r.microbatch_size for r in replicas),
        schedule=schedule,
        replicas=tuple(replicas),
    )
    return Case(
        plan=plan,
        cluster=Cluster(name="random", nodes=tuple(nodes)),
        num_layers=num_layers,
        tensor_sizes={"heads": frozenset({4}), "mlp": frozenset({12, 16})},
        max_seq_len=seq_len + draw(st.integers(0, 8)),
    )


def _stage(
    draw: st.DrawFn, free: dict[str, int], layers: tuple[int, int], launch_ahead: int
) -> Stage:
    node = draw(st.sampled_from(sorted(free)))
    mesh = StageMesh(
        data=draw(st.sampled_from([1, 2])), tensor=draw(st.sampled_from([1, 2, 4]))
    )
    first = free[node]
    free[node] += mesh.data * mesh.tensor
    return Stage(
        node=node,
        devices=tuple(draw(st.permutations(range(first, free[node])))),
        mesh=mesh,
        layers=layers,
        remat=draw(st.sampled_from(REMATS)),
        launch_ahead=launch_ahead,
    )


integers = st.integers(-3, 10**6)
texts = st.text(max_size=8)
_node_names = st.text("aZ09._-", min_size=1, max_size=63).filter(is_node)
figures = st.none() | st.floats(allow_nan=False, allow_infinity=False)

any_stages = st.builds(
    Stage,
    node=_node_names,
    devices=st.lists(integers, max_size=4).map(tuple),
    mesh=st.builds(StageMesh, data=integers, tensor=integers),
    layers=st.tuples(integers, integers),
    remat=st.sampled_from(REMATS),
    launch_ahead=integers,
    precision=st.none() | st.sampled_from(get_args(Precision)),
    offload=st.sampled_from(get_args(Offload)),
)

any_plans = st.builds(
    Plan,
    model=texts,
    seq_len=integers,
    global_batch=integers,
    schedule=texts,
    replicas=st.lists(
        st.builds(
            Replica,
            num_microbatches=integers,
            microbatch_size=integers,
            stages=st.lists(any_stages, max_size=4).map(tuple),
        ),
        max_size=3,
    ).map(tuple),
    packed=st.booleans(),
    programs=st.dictionaries(_node_names, st.text(), max_size=2),
    predicted=st.none()
    | st.builds(
        Prediction,
        step_time_s=figures,
        lower_bound_s=figures,
        gap=figures,
        tokens_per_s=figures,
        usd_per_million_tokens=figures,
        peak_memory_bytes=st.dictionaries(texts, integers, max_size=2),
    ),
)
