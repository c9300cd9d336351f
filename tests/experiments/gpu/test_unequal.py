# SPDX-License-Identifier: Apache-2.0
"""Two shares of one device: plans for them are found, run and compared."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest

from experiments.gpu.claims import CLAIMS
from experiments.gpu.divided.multiprocessors import NoContext, multiprocessors
from experiments.gpu.divided.shares import (
    LARGER,
    SMALLER,
    as_kinds,
    cluster_of_shares,
    kind_of,
    profiled,
    shares_of_card,
    shares_of_cpu,
)
from experiments.gpu.parts import unequal
from experiments.gpu.parts.unequal import ALONE, EVEN, PLANNED, gain, measure
from experiments.gpu.processes.compiling import QUICKLY, noted, quickly
from experiments.gpu.rows import Row
from experiments.gpu.setting import OutOfTime, Setting, Skipped
from hetjax.cluster.catalogue import catalogue, device_spec
from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.local_devices import LocalDevice

pytestmark = pytest.mark.nightly  # takes minutes, for scripts that only a card needs

CARD = LocalDevice(
    platform="cuda",
    device_kind="NVIDIA H100 80GB HBM3",
    handle="GPU-1a2b",
    memory_bytes=80 * 2**30,
)


@pytest.fixture(scope="module")
def rows() -> Iterator[Mapping[str, Row]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        found = measure(Setting(platform="cpu", quick=True))
        yield {row.what: row for row in found}


@pytest.mark.parametrize("layout", [PLANNED, EVEN, ALONE])
def test_each_layout_is_run_and_held_against_its_prediction(
    rows: Mapping[str, Row], layout: str
):
    row = rows[f"step of {layout}"]
    assert row.ratio is not None and row.ratio > 0
    shares = {LARGER} if layout == ALONE else {LARGER, SMALLER}
    named = {share for share in (LARGER, SMALLER) if share in row.note}
    assert named == shares or layout == PLANNED


def test_no_layout_is_predicted_to_be_faster_than_the_planner_s(
    rows: Mapping[str, Row],
):
    planned = rows[f"step of {PLANNED}"].predicted
    assert planned is not None
    for other in (EVEN, ALONE):
        predicted = rows[f"step of {other}"].predicted
        assert predicted is not None and planned <= predicted * 1.005


def test_the_gain_is_that_over_the_better_of_the_others(rows: Mapping[str, Row]):
    row = rows["gain of the planner's layout over the better of the other two"]
    steps = {n: rows[f"step of {n}"].measured for n in (PLANNED, EVEN, ALONE)}
    assert row == gain(
        steps,  # pyright: ignore[reportArgumentType]
        {n: rows[f"step of {n}"].predicted for n in steps},  # pyright: ignore
    )
    row = gain({PLANNED: 2.0, EVEN: 3.0, ALONE: 5.0}, {PLANNED: 1, EVEN: 4, ALONE: 2})
    assert (row.measured, row.predicted) == (1.5, 2.0)


def test_shares_see_one_card_and_parts_of_it(monkeypatch: pytest.MonkeyPatch):
    clients = {"CUDA_VISIBLE_DEVICES": "GPU-1a2b", "CUDA_MPS_PIPE_DIRECTORY": "/pipes"}
    larger, smaller = (share.variables for share in shares_of_card(clients))
    for name, value in clients.items():
        assert larger[name] == smaller[name] == value
    percent = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    assert (larger[percent], smaller[percent]) == ("70", "30")
    memory = [float(v["XLA_PYTHON_CLIENT_MEM_FRACTION"]) for v in (larger, smaller)]
    assert memory == [0.644, 0.276] and sum(memory) == pytest.approx(0.92)


def test_shares_are_two_kinds_to_the_planner_and_one_to_workers(tmp_path: Path):
    shares = shares_of_card({})
    real = cluster_of_shares(shares, "H100-80GB-HBM3", 80.0, tmp_path)
    planned = as_kinds(real, shares)
    assert {node.device for node in real.nodes} == {"H100-80GB-HBM3"}
    assert [node.device for node in planned.nodes] == [
        kind_of(LARGER),
        kind_of(SMALLER),
    ]
    whole = catalogue()["H100-80GB-HBM3"]
    larger, smaller = map(device_spec, planned.nodes)
    assert larger.memory_gib == pytest.approx(56) and larger.bf16_native
    assert smaller.peak_tflops == pytest.approx(0.3 * whole.peak_tflops)
    (way,) = real.links
    assert way.bandwidth_gbit_per_s > 0 and planned.links == real.links


def test_the_slower_cpu_differs_in_how_it_compiles_alone():
    larger, smaller = (dict(share.environment) for share in shares_of_cpu())
    assert "optimization_level=0" in smaller.pop("XLA_FLAGS")
    assert larger == smaller


def test_a_profile_that_does_not_end_is_said_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    nodes = tuple(Node(name=n, device="cpu", count=1) for n in (LARGER, SMALLER))
    cluster, logs = Cluster(name="shares", nodes=nodes), tmp_path / "logs"
    logs.mkdir()

    def measured(limit_s: float, *options: str) -> None:
        shares = shares_of_cpu()
        profiled(shares, cluster, "gpt-2x64", tmp_path, logs, options, limit_s)

    with pytest.raises(OutOfTime, match=r"the profile of the .* share did not end in"):
        measured(0.1)
    with pytest.raises(RuntimeError, match="--no-such-option"):
        measured(60.0, "--no-such-option")
    for name in (LARGER, SMALLER):
        assert "--no-such-option" in (logs / f"profile-{name}.txt").read_text()


def test_processes_of_a_card_compile_without_triton_s_products(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("XLA_FLAGS", "--others=1")
    monkeypatch.setattr(
        unequal, "multi_process_service", lambda handle: nullcontext({"A": "b"})
    )
    with unequal._shares(CARD) as shares:
        for share in shares:
            assert share.variables["XLA_FLAGS"] == f"--others=1 {QUICKLY}"
            assert share.variables["A"] == "b"
    assert QUICKLY in noted("cuda")
    assert (quickly("cpu"), noted("cpu")) == ({}, "")


def skipped(patched: pytest.MonkeyPatch, *cards: LocalDevice) -> str:
    patched.setattr(unequal, "accelerators_here", lambda environment: list(cards))
    with pytest.raises(Skipped) as reason:
        next(measure(Setting(platform="cuda", quick=True)))
    return str(reason.value)


def test_without_a_card_or_without_the_service_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
):
    assert "no GPU" in skipped(monkeypatch)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert "nvidia-cuda-mps-control is not installed" in skipped(monkeypatch, CARD)


def test_multiprocessors_are_asked_under_the_variables_of_each_share(
    monkeypatch: pytest.MonkeyPatch,
):
    percent = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    counts = {None: 132, "70": 92, "30": 40}
    monkeypatch.setattr(
        unequal, "multiprocessors", lambda own: counts[own.get(percent)]
    )
    larger, smaller = unequal._multiprocessors(shares_of_card({}))
    assert (larger.measured, smaller.measured) == (92, 40)
    assert (larger.predicted, smaller.predicted) == pytest.approx((92.4, 39.6))


def test_a_service_that_has_no_use_for_clients_is_a_reason_to_skip(
    monkeypatch: pytest.MonkeyPatch,
):
    def fails(environment: Mapping[str, str]) -> int:
        if "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in environment:
            raise NoContext("cuInit: CUDA error 805")
        return 132

    monkeypatch.setattr(unequal, "multiprocessors", fails)
    with pytest.raises(Skipped, match="error 805"):
        next(unequal._multiprocessors(shares_of_card({})))


def test_a_process_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a driver")
    with pytest.raises(NoContext, match="libcuda"):
        multiprocessors(os.environ)


def test_every_claim_is_decided_by_a_row(rows: Mapping[str, Row]):
    wanted = {claim.what for claim in CLAIMS if claim.part == "unequal"}
    assert wanted and wanted <= rows.keys()
