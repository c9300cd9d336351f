# SPDX-License-Identifier: Apache-2.0
"""The picture of a step: the right kind of file, with all of the step in it."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from hetjax.costs.costs import Costs, Reduction, Route, StageTimes
from hetjax.errors import BadInput
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.report.pictures import picture
from hetjax.report.pictures.picture import check_picture
from hetjax.report.pictures.timeline import timeline_picture
from hetjax.schedule.programs.lower import lower
from hetjax.schedule.simulation.simulator import simulate
from hetjax.schedule.simulation.trace import Span, simulated_spans


def stage(node: str, devices: tuple[int, ...], layers: tuple[int, int], ahead: int):
    return Stage(node=node, devices=devices, layers=layers, launch_ahead=ahead)


def two_replicas() -> Plan:
    return Plan(
        model="m",
        seq_len=1,
        global_batch=7,
        replicas=(
            Replica(
                num_microbatches=4,
                microbatch_size=1,
                stages=(stage("a", (0, 1), (0, 2), 2), stage("b", (0,), (2, 4), 1)),
            ),
            Replica(
                num_microbatches=3,
                microbatch_size=1,
                stages=(stage("c", (5,), (0, 4), 1),),
            ),
        ),
    )


def costs_of(plan: Plan) -> Costs:
    times = StageTimes(
        forward_s=0.01,
        backward_s=0.02,
        fused_s=0.03,
        input_gradient_s=0.01,
        weight_gradient_s=0.01,
        update_s=0.004,
    )
    hop = Route(trunks=("slow",), latency_s=0.002)
    edges = [((0, 0), (0, 1)), ((0, 1), (0, 0))]
    return Costs(
        times={(r, s): times for r, s, _ in plan.stages()},
        trunks={"slow": 1e3},
        routes=dict.fromkeys(edges, hop),
        message_bytes=dict.fromkeys(edges, 5.0),
        reductions={
            layers: Reduction(trunk_bytes={"slow": 8.0}, latency_s=0.002)
            for layers in ((0, 2), (2, 4))
        },
    )


def spans_of(plan: Plan) -> list[Span]:
    costs = costs_of(plan)
    return simulated_spans(simulate(lower(plan), plan, costs), plan, costs)


def drawn(path: Path) -> Path:
    plan = two_replicas()
    timeline_picture(spans_of(plan), plan, costs_of(plan), "a title").save(path)
    return path


@pytest.mark.parametrize(
    ("suffix", "start"),
    [(".png", b"\x89PNG\r\n\x1a\n"), (".pdf", b"%PDF-"), (".svg", b"<?xml")],
)
def test_the_suffix_decides_the_kind_of_file(tmp_path: Path, suffix: str, start: bytes):
    assert drawn(tmp_path / f"step{suffix}").read_bytes().startswith(start)


def test_the_picture_names_devices_replicas_kinds_and_microbatches(tmp_path: Path):
    tree = ElementTree.parse(drawn(tmp_path / "step.svg"))
    texts = [
        "".join(element.itertext()).strip()
        for element in tree.iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"a title", "a/0", "a/1", "b/0", "c/5", "time (ms)"} <= set(texts)
    assert {"forward", "backward", "update", "transfer", "reduction", "idle"} <= set(
        texts
    )
    assert "weight gradient" not in texts  # only kinds that occur
    assert {"layers 0..1", "layers 2..3", "layers 0..3"} <= set(texts)
    assert {"r0: 4 x 1 sequences", "r1: 3 x 1 sequences"} <= set(texts)
    # microbatch 2: F and B on a/0, on a/1, on b/0 and on c/5 (and a tick may say 3)
    assert texts.count("2") == 8


def test_the_wrong_suffix_is_refused(tmp_path: Path):
    with pytest.raises(BadInput, match=r"ends in \.pdf, \.png, \.svg"):
        check_picture(tmp_path / "step.jpg")


def test_without_matplotlib_the_extra_to_install_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install 'hetjax\[plot\]'"):
        check_picture(tmp_path / "step.png")
