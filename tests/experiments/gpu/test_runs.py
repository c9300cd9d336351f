# SPDX-License-Identifier: Apache-2.0
"""The first part of a session: what the card is, and that hetjax trains on it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import pytest

from experiments.gpu.claims import CLAIMS
from experiments.gpu.models.tiny_run import RunSize, furthest
from experiments.gpu.parts import runs
from experiments.gpu.parts.runs import PRECISIONS, measure, one_stage_plan
from experiments.gpu.processes.background import Background, python_module
from experiments.gpu.rows import Row
from experiments.gpu.setting import Setting
from hetjax.mesh.driver import read_cards
from hetjax.models.presets import model_preset

H100 = "GPU-1a2b, NVIDIA H100 80GB HBM3, 81559, Disabled, 9.0, 580.65.06"
SIZE = RunSize(steps=2, seq_len=16, microbatches=2, microbatch_size=4)


@pytest.fixture(scope="module")
def rows() -> Mapping[str, Row]:
    return {row.what: row for row in measure(Setting(platform="cpu", quick=True))}


@pytest.mark.nightly
def test_the_card_comes_first(rows: Mapping[str, Row]):
    assert next(iter(rows)) == "card"
    assert rows["card"].measured == jax.local_devices()[0].device_kind


@pytest.mark.nightly
def test_training_runs_and_its_loss_falls(rows: Mapping[str, Row]):
    row = rows["hetjax train runs, and its loss falls"]
    assert row.measured is True, row.note


@pytest.mark.nightly
@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda each: each.name)
def test_the_same_run_has_the_losses_of_the_cpu(rows: Mapping[str, Row], precision):
    distance = rows[f"losses in {precision.name}, furthest from the CPU's"]
    assert distance.measured == 0  # here the device is the CPU
    assert rows[f"losses in {precision.name} are the CPU's within rounding"].measured


@pytest.mark.nightly
def test_commands_end_well_and_name_what_is_here(rows: Mapping[str, Row]):
    for command in ("devices", "doctor"):
        row = rows[f"exit code of hetjax {command}"]
        assert row.measured == 0, row.note
    assert rows["hetjax devices names the card"].measured is True
    assert rows["discovery finds the devices that JAX has"].measured is True


def test_the_plan_holds_the_whole_model_on_one_device():
    (replica,) = one_stage_plan(SIZE).replicas
    (stage,) = replica.stages
    assert stage.layers == (0, len(model_preset("tiny").layers))


def test_a_command_that_had_no_time_is_not_judged(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("")
    with python_module(log, "timeit", ["-s", "import time", "time.sleep(600)"]) as run:
        late = Setting(platform="cpu", quick=True, ends_s=time.monotonic())
        assert [row.measured for row in runs._devices(run, late)] == [None, None]


def beside_cpu(found: Sequence[float], expected: Sequence[float], tmp_path) -> Row:
    log = tmp_path / "log.txt"
    log.write_text("the last words")
    run = Background(process=None, log=log)  # pyright: ignore[reportArgumentType]
    _, row = runs._beside_cpu(PRECISIONS[0], found, expected, SIZE, run)
    return row


def test_losses_beyond_the_bound_are_not_equal_and_missing_ones_say_nothing(tmp_path):
    bound = PRECISIONS[0].bound
    near, far = 2 * (1 + 0.9 * bound), 2 * (1 - 1.1 * bound)
    assert beside_cpu([5.0, near], [5.0, 2.0], tmp_path).measured is True
    assert beside_cpu([5.0, far], [5.0, 2.0], tmp_path).measured is False
    assert beside_cpu([5.0], [5.0, 2.0], tmp_path).measured is None
    assert beside_cpu([], [], tmp_path).measured is None
    assert furthest([3.0, 1.0], [2.0, 1.0]) == 0.5


@dataclass(frozen=True)
class FakeCard:
    """The attributes of a `jax.Device` that are read, on a card of 79.65 GiB."""

    bytes_limit: int
    device_kind: str = "NVIDIA H100 80GB HBM3"
    platform: str = "cuda"
    compute_capability: str = "9.0"
    client = None

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": self.bytes_limit}


@pytest.mark.parametrize(("share", "fits"), [(0.92, True), (0.75, False)])
def test_memory_is_held_against_catalogue_driver_and_budget(
    share: float, fits: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{share}")
    (card,) = read_cards(H100)
    device = FakeCard(bytes_limit=int(share * 81559 * 2**20))
    found = {r.what: r for r in runs._memory(device, card)}  # pyright: ignore
    total, limit, within = found.values()
    assert total.measured == pytest.approx(79.65, abs=0.01)
    assert total.ratio == pytest.approx(1, abs=1e-3)
    assert limit.ratio == pytest.approx(1, abs=1e-3)
    assert within.what == "memory of a plan is within JAX's limit"
    assert within.measured is fits


@pytest.mark.nightly
def test_every_claim_is_decided_by_a_row(rows: Mapping[str, Row]):
    wanted = {claim.what for claim in CLAIMS if claim.part == "runs"}
    assert wanted and wanted <= rows.keys()
