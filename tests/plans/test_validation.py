# SPDX-License-Identifier: Apache-2.0
"""Every broken rule of a plan is reported in three parts."""

from dataclasses import replace
from typing import Any

import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.errors import BadInput
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh
from hetjax.plans.schedules import SCHEDULES
from hetjax.plans.validation import validate_plan
from tests.plans.strategies import Case, validate, with_replica, with_stage

CASE = Case(
    plan=Plan(
        model="tiny",
        seq_len=128,
        global_batch=16,
        replicas=(
            Replica(
                num_microbatches=4,
                microbatch_size=2,
                stages=(
                    Stage(
                        node="a100-0",
                        devices=(0, 1),
                        mesh=StageMesh(tensor=2),
                        layers=(0, 3),
                        launch_ahead=3,
                    ),
                    Stage(node="v100-0", devices=(0,), layers=(3, 5), launch_ahead=2),
                    Stage(node="h20-0", devices=(0,), layers=(5, 6), launch_ahead=1),
                ),
            ),
            Replica(
                num_microbatches=8,
                microbatch_size=1,
                stages=(
                    Stage(node="h20-0", devices=(1,), layers=(0, 4), launch_ahead=2),
                    Stage(node="h20-0", devices=(2,), layers=(4, 6), launch_ahead=1),
                ),
            ),
        ),
    ),
    cluster=Cluster(
        name="tiny",
        nodes=(
            Node(name="a100-0", device="A100-SXM4-80GB", count=2),
            Node(name="v100-0", device="V100-SXM2-32GB", count=1),
            Node(name="h20-0", device="H20", count=4),
        ),
    ),
    num_layers=6,
    tensor_sizes={"heads": frozenset({4}), "mlp": frozenset({16, 24})},
    max_seq_len=256,
)
STAGE = "replicas[0].stages[1]"


def stage(**changes: Any) -> Plan:
    """Return the example with its stage STAGE changed."""
    return with_stage(CASE.plan, 0, 1, **changes)


ONCE = "stages that hold layers 0 to 5 once each, in order"
_SHARING = " and ".join(name for name, row in SCHEDULES.items() if row.shares)
ONE_STAGE = f"a device in one stage only (schedules {_SHARING} allow more)"


@pytest.mark.parametrize(
    ("plan", "got", "allowed", "fix"),
    [
        (
            replace(CASE.plan, schedule="1fb1"),
            "schedule = '1fb1'",
            f"one of {', '.join(SCHEDULES)}",
            "did you mean '1f1b'?",
        ),
        (
            stage(node="v10-0"),
            f"{STAGE}.node = 'v10-0'",
            "one of a100-0, v100-0, h20-0",
            "did you mean 'v100-0'?",
        ),
        (
            stage(remat="everything"),
            f"{STAGE}.remat = 'everything'",
            "one of none, selective, full",
            "use one of none, selective, full",
        ),
        (
            stage(offload="masters"),
            f"{STAGE}.offload = 'masters'",
            "one of none, optimizer",
            "use one of none, optimizer",
        ),
        (
            stage(precision="fp16"),
            f"{STAGE}.precision = 'fp16'",
            "one of bfloat16, float16, float32",
            "use one of bfloat16, float16, float32",
        ),
        (
            replace(CASE.plan, programs={"x": ""}),
            "programs for node = 'x'",
            "one of a100-0, v100-0, h20-0",
            "use one of a100-0, v100-0, h20-0",
        ),
        (
            replace(CASE.plan, replicas=()),
            "replicas = []",
            "replicas with 1 entry or more",
            "add an entry to replicas",
        ),
        (
            stage(devices=()),
            f"{STAGE}.devices = []",
            f"{STAGE}.devices with 1 entry or more",
            f"add an entry to {STAGE}.devices",
        ),
        (
            replace(CASE.plan, seq_len=0),
            "seq_len = 0",
            "1 <= seq_len <= 16777216",
            "write seq_len as 1 or more",
        ),
        (
            stage(launch_ahead=0),
            f"{STAGE}.launch_ahead = 0",
            f"1 <= {STAGE}.launch_ahead <= 65536",
            f"write {STAGE}.launch_ahead as 1 or more",
        ),
        (
            replace(CASE.plan, seq_len=300),
            "seq_len = 300",
            "seq_len <= 256, the model's max_seq_len",
            "write seq_len as 256 or less",
        ),
        (
            stage(layers=(5, 5)),
            f"{STAGE}.layers = [5, 5]",
            "[first, end] with 0 <= first < end <= 6, the model's number of layers",
            "write a range within [0, 6]",
        ),
        (
            stage(layers=(4, 5)),
            "replicas[0] leaves out layer 3 before stages[1]",
            ONCE,
            f"start {STAGE}.layers at 3",
        ),
        (
            stage(layers=(1, 5)),
            f"{STAGE} overlaps the stages before it in layers 1 to 2",
            ONCE,
            f"start {STAGE}.layers at 3",
        ),
        (
            with_stage(CASE.plan, 1, 1, layers=(4, 5)),
            "replicas[1] leaves out layer 5 after its last stage",
            ONCE,
            "end the last stage's layers at 6",
        ),
        (
            stage(devices=(1,)),
            f"{STAGE}.devices has 1, but node 'v100-0' has 1 device",
            "device indices 0 to 0 on 'v100-0'",
            "change the index, or give another --cluster",
        ),
        (
            with_stage(CASE.plan, 1, 1, devices=(0,)),
            "replicas[1].stages[1] uses device 0 of 'h20-0', which "
            "replicas[0].stages[2] uses already",
            ONE_STAGE,
            "use a free device of 'h20-0': 2, 3",
        ),
        (
            with_stage(CASE.plan, 0, 0, devices=(1, 1)),
            "replicas[0].stages[0] uses device 1 of 'a100-0', which "
            "replicas[0].stages[0] uses already",
            ONE_STAGE,
            "use a free device of 'a100-0': 0",
        ),
        (
            stage(node="a100-0"),
            f"{STAGE} uses device 0 of 'a100-0', which replicas[0].stages[0] uses "
            "already",
            ONE_STAGE,
            "use another node: all devices of 'a100-0' are in use",
        ),
        (
            stage(mesh=StageMesh(data=2, tensor=2)),
            f"{STAGE}.mesh is data 2 x tensor 2 = 4, but the stage has 1 device",
            "data x tensor: 1 x 1",
            "change mesh or devices so that data x tensor = number of devices",
        ),
        (
            stage(node="h20-0", devices=(3,), mesh=StageMesh(data=1, tensor=2)),
            f"{STAGE}.mesh is data 1 x tensor 2 = 2, but the stage has 1 device",
            "data x tensor: 1 x 1",
            "change mesh or devices so that data x tensor = number of devices",
        ),
        (
            with_stage(
                with_replica(CASE.plan, 0, microbatch_size=1),
                0,
                0,
                mesh=StageMesh(data=2),
            ),
            "replicas[0].microbatch_size = 1 with replicas[0].stages[0].mesh.data = 2",
            "a multiple of 2",
            "write microbatch_size as 2, or data as one of 1",
        ),
        (
            replace(CASE.plan, global_batch=15),
            "global_batch = 15, but num_microbatches x microbatch_size sum to "
            "4 x 2 + 8 x 1 = 16",
            "a sum over the replicas equal to global_batch",
            "write global_batch as 16, or change num_microbatches",
        ),
        (
            stage(launch_ahead=4),
            f"{STAGE}.launch_ahead = 4, but the stage before it has 3",
            "launch_ahead that does not rise along the pipeline",
            "write 3 or less, or leave launch_ahead out of all stages",
        ),
    ],
)
def test_a_broken_rule_is_told_in_three_parts(plan, got, allowed, fix):
    with pytest.raises(BadInput) as caught:
        validate(CASE, plan)
    assert caught.value.got == got
    assert caught.value.allowed == allowed
    assert caught.value.fix == fix


def test_a_tensor_degree_that_does_not_divide_names_the_axis_and_the_degrees():
    one_stage = Stage(
        node="a",
        devices=tuple(range(8)),
        mesh=StageMesh(tensor=8),
        layers=(0, 2),
        launch_ahead=1,
    )
    replica = Replica(num_microbatches=1, microbatch_size=1, stages=(one_stage,))
    plan = Plan(model="m", seq_len=1, global_batch=1, replicas=(replica,))
    cluster = Cluster(name="c", nodes=(Node(name="a", device="cpu", count=8),))
    sizes = {"mlp": {16}, "heads": {12, 20}}
    with pytest.raises(BadInput) as caught:
        validate_plan(plan, cluster, 2, sizes, 1)
    assert caught.value.got == (
        "replicas[0].stages[0].mesh.tensor = 8 does not divide 'heads' of size 12, 20"
    )
    assert caught.value.allowed == "tensor degrees 1, 2, 4"
    assert (
        caught.value.fix == "change replicas[0].stages[0].mesh.tensor to one of these"
    )


def test_the_example_is_valid():
    validate(CASE, CASE.plan)


def test_masters_cannot_be_on_the_host_of_a_stage_that_has_two():
    a100, *others = CASE.cluster.nodes
    cluster = replace(CASE.cluster, nodes=(replace(a100, hosts=2), *others))
    case = replace(CASE, cluster=cluster)
    validate(case, case.plan)
    with pytest.raises(BadInput) as caught:
        validate(case, with_stage(case.plan, 0, 0, offload="optimizer"))
    told = caught.value
    assert told.got == (
        "replicas[0].stages[0].offload = 'optimizer', but the stage is on 2 hosts"
    )
    assert told.allowed.startswith("masters and optimizer state on the host of a stage")
    assert told.fix.startswith("leave offload out")
    validate(case, with_stage(case.plan, 0, 1, offload="optimizer"))
