# SPDX-License-Identifier: Apache-2.0
"""Every training method takes its steps beside its prediction; runs resume exactly."""

import time
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from experiments.gpu.claims import CLAIMS
from experiments.gpu.models.one_stage import NODE
from experiments.gpu.parts import methods
from experiments.gpu.parts.methods import METHODS
from experiments.gpu.rows import Row
from experiments.gpu.setting import Setting
from hetjax.cluster.cluster import Node
from hetjax.errors import NoFeasiblePlan
from hetjax.models.model import abstract_params
from tests import jax_settings

pytestmark = pytest.mark.nightly  # takes minutes, for scripts that only a card needs

QUICK = Setting(platform="cpu", quick=True)
NODE_HERE = Node(name=NODE, device="cpu", count=1)
# the process's peaks before and after each method; the second does not raise it
PEAKS = (10, 100, 100, 100, 100, 300, 300, 400, 400, 500)
NAMES = {method.name for method in METHODS}


@pytest.fixture(scope="module")
def measured() -> Iterator[list[Row]]:
    peaks = iter(PEAKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "peak_bytes", lambda device: next(peaks))
        patch.setattr(jax.stages.Lowered, "compile", jax.stages.Lowered.compile)
        jax_settings.compile_quickly()
        with jax.numpy_dtype_promotion("standard"):  # as users have it
            yield [*methods.measure(QUICK)]


@pytest.fixture(scope="module")
def rows(measured: list[Row]) -> dict[str, Row]:
    return {row.what: row for row in measured}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_method_takes_ten_steps_beside_what_was_predicted(
    rows: dict[str, Row], name: str
):
    assert rows[f"{name}: runs"].measured is True, rows[f"{name}: runs"].note
    assert rows[f"{name}: steps that were skipped"].measured == 0
    assert "median of 10" in rows[f"{name}: step"].note
    assert rows[f"{name}: step"].ratio


def test_a_peak_counts_only_above_the_one_before(measured: list[Row]):
    peaks = [row for row in measured if row.what.endswith("peak memory")]
    predicted = [row.predicted for row in peaks]
    assert predicted == sorted(predicted, key=lambda p: p or 0)
    assert [row.measured for row in peaks] == [100, None, 300, 400, 500]
    assert "100 bytes" in peaks[1].note


def test_each_method_is_what_its_name_says():
    stages = {method.name: method.stage(QUICK, NODE_HERE) for method in METHODS}

    def trained(name: str) -> int:
        modules = stages[name].model.modules
        values = [p for m in modules for p in abstract_params(m).values()]
        return sum(int(np.prod(p.shape)) for p in values if p.trained)

    whole = trained("packed sequences")
    assert trained("LoRA") == trained("QLoRA (NF4)") < whole / 2
    held = {m.frozen_as for m in stages["QLoRA (NF4)"].model.modules}
    assert "nf4" in held
    assert stages["optimizer on the host"].stage.offload == "optimizer"
    assert stages["float16 with loss scaling"].loss_scale is not None
    inputs_GL, _, documents_GL = stages["packed sequences"].batch()
    assert documents_GL.shape == inputs_GL.shape
    assert {*documents_GL[0].tolist()} == {1, 2}
    assert len(stages["LoRA"].batch()) == 2


def test_a_run_that_was_stopped_has_the_losses_of_one_that_was_not(
    rows: dict[str, Row],
):
    same = rows["a run that was stopped and resumed: losses of one that was not"]
    assert same.measured is True, same.note
    assert same.note.startswith("6 steps")


def test_what_claims_ask_for_is_measured(rows: dict[str, Row]):
    asked = [claim.what for claim in CLAIMS if claim.part == "methods"]
    assert asked and {*asked} <= rows.keys()


@pytest.fixture
def no_resuming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "stopped_and_resumed", lambda setting: iter(()))


@pytest.mark.usefixtures("no_resuming")
def test_where_time_is_short_the_first_methods_are_tried(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(methods, "_prepared", refuse)
    hurried = Setting(platform="cpu", quick=True, ends_s=time.monotonic() + 11)
    rows = {row.what: row for row in methods.measure(hurried)}
    first, second, *others = [method.name for method in METHODS]
    assert {name for name in NAMES if f"{name}: step" in rows} == {first, second}
    for name in others:
        row = rows[f"{name}: runs"]
        assert row.measured is None and "time" in row.note


def refuse(*arguments: object) -> None:
    raise NoFeasiblePlan(got="a device without room", allowed="more", fix="none")


@pytest.mark.usefixtures("no_resuming")
def test_a_method_that_fails_costs_its_own_rows_alone(monkeypatch: pytest.MonkeyPatch):
    def fail(runtime: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("hetjax.runtime.execution.stages.Stages.compile", fail)
    rows = {row.what: row for row in methods.measure(QUICK)}
    for name in NAMES:
        assert rows[f"{name}: runs"].measured is False
        assert "no such kernel" in rows[f"{name}: runs"].note


@pytest.mark.usefixtures("no_resuming")
def test_a_method_that_does_not_fit_is_a_row(monkeypatch: pytest.MonkeyPatch):
    small = Node(name=NODE, device="cpu", count=1, memory_gib=0.001)
    monkeypatch.setattr(methods, "node_of", lambda device: small)
    found = [row for row in methods.measure(QUICK) if row.what.endswith(": step")]
    assert {row.what.removesuffix(": step") for row in found} == NAMES
    assert all(row.measured is None and "GiB" in row.note for row in found)
