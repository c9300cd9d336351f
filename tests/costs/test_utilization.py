# SPDX-License-Identifier: Apache-2.0
"""Model FLOPs utilization and energy against a manual count."""

from dataclasses import replace

import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.utilization import DeviceUse, device_use, seconds_at_peak
from hetjax.models.decoders import LlamaConfig, llama_model
from hetjax.plans.plan import Plan, Replica, Stage, StageMesh

MODEL = llama_model(
    LlamaConfig(
        name="small",
        vocab_size=128,
        hidden_size=16,
        inner_size=32,
        num_blocks=1,
        num_heads=4,
        num_kv_heads=2,
        max_seq_len=8,
    )
)
STAGES = (
    Stage(
        node="a",
        devices=(0, 1),
        mesh=StageMesh(tensor=2),
        layers=(0, 2),
        launch_ahead=2,
    ),
    Stage(node="b", devices=(0,), layers=(2, 3), launch_ahead=1),
)
PLAN = Plan(
    model="small",
    seq_len=8,
    global_batch=6,
    replicas=(Replica(num_microbatches=3, microbatch_size=2, stages=STAGES),),
)
A100, OWN = (
    Node(name="a", device="A100-SXM4-80GB", count=4),
    Node(name="b", device="own", count=1, peak_tflops=10.0),
)


def test_seconds_at_peak_count_used_devices_and_three_forward_passes():
    tokens, d, f, kv, v = 8, 16, 32, 8, 128
    projections = 2 * tokens * (2 * d * d + 2 * d * kv + 3 * d * f)
    attention = 2 * 2 * tokens * tokens * d
    head = 2 * tokens * d * v
    step_flops = 3 * 6 * (projections + attention + head)
    expected_s = step_flops / ((2 * 312 + 10) * 1e12)
    found_s = seconds_at_peak(PLAN, MODEL, Cluster(name="c", nodes=(A100, OWN)))
    assert found_s == pytest.approx(expected_s)


@pytest.mark.parametrize("device", ["cpu", "never-heard-of"])
def test_without_a_peak_there_is_no_utilization(device: str):
    unknown = replace(OWN, device=device, peak_tflops=None)
    cluster = Cluster(name="c", nodes=(A100, unknown))
    assert seconds_at_peak(PLAN, MODEL, cluster) is None


def test_energy_is_the_board_power_of_used_devices_for_as_long_as_a_step_takes():
    l4 = replace(OWN, device="L4", count=3)
    line = {"step_time_s": 0.5, "tokens": 48}
    found = device_use(PLAN, MODEL, Cluster(name="c", nodes=(A100, l4))).metrics(line)
    assert found["joules_per_token"] == (2 * 400 + 72) * 0.5 / 48  # by data sheets
    assert found.keys() == {"mfu", "joules_per_token"}


@pytest.mark.parametrize("device", ["cpu", "own"])
def test_without_the_power_of_all_devices_no_energy_is_known(device: str):
    other = replace(OWN, device=device)
    use = device_use(PLAN, MODEL, Cluster(name="c", nodes=(A100, other)))
    found = use.metrics({"step_time_s": 0.5, "tokens": 48})
    assert "mfu" in found and "joules_per_token" not in found
    assert DeviceUse().metrics({"step_time_s": 0.5, "tokens": 48}) == {}
