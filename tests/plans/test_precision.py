# SPDX-License-Identifier: Apache-2.0
"""A stage's precision: the plan's, else the requested, else the best there."""

import pytest

from hetjax.cluster.catalogue import best_precision, catalogue
from hetjax.cluster.cluster import Cluster, Node
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.plans.precision import stage_precision, with_precisions

# NVIDIA's compute capabilities 7.0 and 7.5: matrix units for fp16, none for bf16
FP16_FAMILIES = ("V100", "TITAN-V", "T4", "GeForce-RTX-20", "Quadro-RTX", "TITAN-RTX")
# older than these, or 7.5 without matrix units; and devices without acceleration
FP32_FAMILIES = ("P100", "P40", "P4", "TITAN-X", "GeForce-GTX", "cpu")


def test_a_device_does_best_what_its_matrix_units_multiply():
    for name, spec in catalogue().items():
        expected = "bfloat16"
        if name.startswith(FP16_FAMILIES):
            expected = "float16"
        elif name.startswith(FP32_FAMILIES):
            expected = "float32"
        assert best_precision(spec) == expected, name


@pytest.mark.parametrize(
    ("said", "device", "asked", "found"),
    [
        ("float32", "V100-16-SXM2", "bfloat16", "float32"),
        (None, "V100-16-SXM2", "bfloat16", "bfloat16"),
        (None, "V100-16-SXM2", "best", "float16"),
        (None, "Tesla-T4", None, "float16"),
        (None, "A100-80-SXM", "best", "bfloat16"),
        (None, "a card of tomorrow", "best", "bfloat16"),
        (None, "cpu", "best", "float32"),
    ],
)
def test_a_stage_is_asked_first_then_the_person_then_the_device(
    said, device, asked, found
):
    stage = Stage(node="n", devices=(0,), layers=(0, 6), launch_ahead=1, precision=said)
    node = Node(name="n", device=device, count=1)
    assert stage_precision(stage, node, asked) == found
    replica = Replica(num_microbatches=1, microbatch_size=1, stages=(stage,))
    plan = Plan(model="tiny", seq_len=8, global_batch=1, replicas=(replica,))
    cluster = Cluster(name="c", nodes=(node,))
    told = with_precisions(plan, cluster, asked)
    assert [stage.precision for _, _, stage in told.stages()] == [found]
    assert with_precisions(told, cluster, "float32") == told
