# SPDX-License-Identifier: Apache-2.0
"""Ways to train the same model take turns, and what they print adds up."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.gpu.models.one_stage import NODE, one_stage, other_forms
from experiments.gpu.models.way import Task, Way, WayFailed
from experiments.gpu.parts import speed
from experiments.gpu.rows import Row
from experiments.gpu.setting import Setting
from hetjax.cluster.cluster import Node
from hetjax.models.presets import model_config

QUICK = Setting(platform="cpu", quick=True)
TASK = Task(
    model="tiny",
    seq_len=32,
    microbatches=2,
    size=1,
    remat="none",
    precision="float32",
    platform="cpu",
)


@pytest.fixture(scope="module")
def rows() -> Mapping[str, Row]:
    return {row.what: row for row in speed.measure(QUICK)}


def test_rates_are_tokens_over_seconds_and_the_ratio_is_of_both(
    rows: Mapping[str, Row],
):
    for name in ("hetjax", "one plain jit"):
        step, rate = rows[f"step, {name}"].measured, rows[f"rate, {name}"].measured
        assert isinstance(step, float) and step > 0
        assert rate == pytest.approx(2 * 32 / step)
    utilization = rows["model FLOP utilization, hetjax"].measured
    assert isinstance(utilization, float) and utilization > 0
    ratio = rows["rate of hetjax over one plain jit"].measured
    assert isinstance(ratio, float) and ratio > 0


def test_the_product_stands_beside_its_prediction(rows: Mapping[str, Row]):
    assert rows["step, hetjax"].ratio
    assert rows["peak memory, hetjax"].predicted
    assert rows["step, one plain jit"].predicted is None


def test_a_model_that_does_not_fit_is_a_row(monkeypatch: pytest.MonkeyPatch):
    small = Node(name=NODE, device="cpu", count=1, memory_gib=0.001)
    monkeypatch.setattr(speed, "node_of", lambda device: small)
    (row,) = speed.measure(QUICK)
    assert (row.what, row.measured, row.note) == ("fits", False, "tiny")


def test_a_way_that_fails_costs_its_own_rows_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(speed, "has_torch", lambda: True)
    (tmp_path / "torch.py").write_text("raise ImportError('no such card')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    found = {row.what: row for row in speed.measure(QUICK)}
    assert found["runs, PyTorch"].measured is False
    assert "no such card" in found["runs, PyTorch"].note
    assert "rate of hetjax over one plain jit" in found
    assert "rate of hetjax over PyTorch" not in found


def test_a_way_says_why_it_ended():
    way = Way("product", replace(TASK, model="tiny", size=0))
    with pytest.raises(WayFailed, match="Error"):
        way.ready()


def on(device: str):
    node = Node(name=NODE, device=device, count=1)
    return one_stage(model_config("llama-1b"), node, microbatches=8, size=1)


@pytest.mark.parametrize(
    ("device", "precision", "attention"),
    [
        ("V100-SXM2-32GB", "float16", "chunked"),
        ("T4", "float16", "chunked"),
        ("A100-SXM4-80GB", "bfloat16", "cudnn"),
        ("H100-SXM5-80GB", "bfloat16", "cudnn"),
        ("TPU-v5e", "bfloat16", "splash"),
    ],
)
def test_a_card_computes_in_what_the_product_would_choose_there(
    device: str, precision: str, attention: str
):
    stage = on(device)
    assert (stage.precision, stage.stage.attention) == (precision, attention)
    assert (stage.loss_scale is None) == (precision != "float16")
    assert len(other_forms(stage.stage.attention)) == (
        1 if attention == "chunked" else 2
    )
