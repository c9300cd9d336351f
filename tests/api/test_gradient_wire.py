# SPDX-License-Identifier: Apache-2.0
"""Plans and simulations count the gradients' type on the wire, as a run does."""

import json
from pathlib import Path

import pytest

from hetjax.api.planning import find_plan
from hetjax.api.simulating import simulate_plan
from hetjax.cli.simulate import simulate
from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.models.model import parameter_count
from hetjax.models.presets import model_preset
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.plans.plan_files import write_plan

GBIT_PER_S = 0.5
MODEL = model_preset("gpt2-124m")


def two_rooms(gbit_per_s: float = GBIT_PER_S) -> Cluster:
    nodes = tuple(Node(name=name, device="RTX-4090", count=1) for name in ("a", "b"))
    link = Link(between=("a", "b"), bandwidth_gbit_per_s=gbit_per_s, latency_ms=0.1)
    return Cluster(name="rooms", nodes=nodes, links=(link,))


def a_replica_each() -> Plan:
    num_layers = len(MODEL.layers)
    return Plan(
        model=MODEL.name,
        seq_len=128,
        global_batch=4,
        replicas=tuple(
            Replica(
                num_microbatches=2,
                microbatch_size=1,
                stages=(
                    Stage(
                        node=node, devices=(0,), layers=(0, num_layers), launch_ahead=1
                    ),
                ),
            )
            for node in ("a", "b")
        ),
    )


def test_a_sum_in_bfloat16_takes_half_the_time_on_the_way():
    whole, halved = (
        simulate_plan(
            a_replica_each(), cluster=two_rooms(), gradient_wire=wire, quiet=True
        )
        for wire in ("float32", "bfloat16")
    )
    elements = sum(parameter_count(layer, trained=True) for layer in MODEL.layers)
    saved_s = 2 * elements / (GBIT_PER_S * 1e9 / 8)
    assert whole.step_time_s - halved.step_time_s == pytest.approx(saved_s, rel=1e-3)


@pytest.fixture(scope="module")
def in_rooms():
    few = {"microbatch_sizes": (2,), "tensor": (1,), "remat": ("none",)}
    return find_plan(
        model="gpt2-124m",
        cluster=two_rooms(10.0),
        global_batch=64,
        seq_len=512,
        quiet=True,
        **few,
    )


def test_a_plan_says_what_bfloat16_would_gain_and_simulate_says_the_same(
    in_rooms, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    values = in_rooms.values()
    assert values["gradient_wire"] == "float32"
    write_plan(tmp_path / "plan.json", in_rooms.plan)
    (tmp_path / "rooms.toml").write_text(
        "\n".join(
            [
                'name = "rooms"',
                *(
                    f'[[node]]\nname = "{n}"\ndevice = "RTX-4090"\ncount = 1'
                    for n in "ab"
                ),
                '[[link]]\nbetween = ["a", "b"]\nbandwidth_gbit_per_s = 10.0',
                "latency_ms = 0.1",
            ]
        )
    )
    given = [str(tmp_path / "plan.json"), "--cluster", str(tmp_path / "rooms.toml")]

    def simulated_s(*more: str) -> float:
        simulate([*given, *more, "--json"])
        return json.loads(capsys.readouterr().out)["step_time_s"]

    assert simulated_s() == pytest.approx(values["step_time_s"], rel=1e-9)
    smaller_s = simulated_s("--gradient-wire", "bfloat16")
    assert smaller_s == pytest.approx(values["bfloat16_step_time_s"], rel=1e-9)
    assert smaller_s < 0.95 * values["step_time_s"]
    less = f"{1 - smaller_s / values['step_time_s']:.1%} less"
    lines = [ln for ln in str(in_rooms).splitlines() if "--gradient-wire" in ln]
    assert len(lines) == 1 and less in lines[0]


def test_a_search_counts_what_is_sent(in_rooms):
    halved = find_plan(
        model="gpt2-124m",
        cluster=two_rooms(10.0),
        global_batch=64,
        seq_len=512,
        gradient_wire="bfloat16",
        microbatch_sizes=(2,),
        tensor=(1,),
        remat=("none",),
        quiet=True,
    )
    assert halved.values()["gradient_wire"] == "bfloat16"
    assert halved.values()["bfloat16_step_time_s"] is None
    assert halved.step_time_s <= in_rooms.values()["bfloat16_step_time_s"] * 1.005
    assert halved.lower_bound_s is not None
    assert halved.lower_bound_s <= halved.step_time_s
