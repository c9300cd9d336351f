# SPDX-License-Identifier: Apache-2.0
"""A worker is lost, and other replicas take over its samples until it is back."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from hetjax.launchers.local_processes import OnThisMachine
from hetjax.plans.plan import Plan
from hetjax.runtime.execution.commit import StepCommit
from hetjax.train import main
from hetjax.training.recovery.driver import Driver
from tests.short_runs import draws
from tests.training.counted_compiling import FOLDER, counts
from tests.training.pair import (
    STEPS,
    TWO_REPLICAS,
    kill,
    process_of,
    trained,
    training,
    wait_until,
)
from tests.training.small import events
from tests.training.test_offload_runs import offloaded
from tests.training.test_workers import losses, processes_of

pytestmark = pytest.mark.usefixtures("environment")
COMPILED_S = 300.0  # at the lowest priority
Before = dict[int, Callable[[Driver], object]]  # by step, what to do before it


def rerouted_run(
    run_dir: Path,
    cache: Path,
    patched: pytest.MonkeyPatch,
    before: Before,
    *options: str,
    of: Plan = TWO_REPLICAS,
) -> None:
    step = Driver.step

    def do_and_step(driver: Driver, number: int, *, traced: bool = False) -> StepCommit:
        if number in before:
            before.pop(number)(driver)
        return step(driver, number, traced=traced)

    patched.setattr(Driver, "step", do_and_step)
    assert main(training(run_dir, cache, "--reroute", *options, of=of)) == 0
    assert not processes_of(run_dir)


def assert_as_if_nothing_had_happened(run_dir: Path, whole: list[float]) -> None:
    assert trained(run_dir) == [*STEPS]
    assert losses(run_dir) == pytest.approx(whole, rel=1e-5)


def has_called(driver: Driver) -> None:
    wait_until(lambda: "right" in driver._controller.connections.workers)


def has_compiled(driver: Driver) -> None:
    is_so = lambda: driver._controller.are_compiled(["right"])  # noqa: E731
    wait_until(is_so, COMPILED_S)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder where each worker's process records its compilations."""
    defaults = OnThisMachine.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "module", "tests.training.counted_compiling")
    monkeypatch.setenv(FOLDER, str(folder := tmp_path / "compiled"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    folder.mkdir()
    return folder


def test_others_train_on_the_samples_of_a_killed_worker_until_it_is_back(
    tmp_path: Path,
    cache: Path,
    whole: list[float],
    monkeypatch: pytest.MonkeyPatch,
    compiled: Path,
):
    """The returned worker finds all its programs in JAX's cache."""
    run_dir = tmp_path / "run"
    processes: list[int | None] = []

    def compiled_ahead(driver: Driver) -> None:
        has_compiled(driver)
        processes.append(process_of(run_dir, "right"))

    before: Before = {
        1: lambda driver: kill(run_dir, "right"),
        3: has_called,
        4: compiled_ahead,
    }
    rerouted_run(run_dir, cache, monkeypatch, before)
    (newcomer,) = processes
    assert newcomer is not None
    num_compiled, num_found = counts(compiled, newcomer)
    assert num_compiled == num_found > 10
    assert_as_if_nothing_had_happened(run_dir, whole)
    (rerouted,) = events(run_dir, "rerouted")
    assert rerouted["step"] == 1 and rerouted["replicas"] == [1]
    assert "right" in rerouted["reason"]
    (recovered,) = events(run_dir, "recovered")
    assert 2 <= recovered["step"] <= 4 and recovered["started"] == ["right"]
    assert recovered["lost_steps"] == 0
    assert recovered["bytes"].keys() <= {"peer", "disk"}


@pytest.mark.parametrize("offload", draws(["optimizer", "none"], short=1))
def test_holders_have_the_same_bits_after_a_detour_wherever_their_masters_are(
    tmp_path: Path,
    cache: Path,
    whole: list[float],
    monkeypatch: pytest.MonkeyPatch,
    offload: Literal["none", "optimizer"],
):
    run_dir = tmp_path / "run"
    before: Before = {
        1: lambda driver: kill(run_dir, "right"),
        3: has_called,
        4: has_compiled,
    }
    plan = offloaded(TWO_REPLICAS) if offload == "optimizer" else TWO_REPLICAS
    words = "--digest-every", "1"
    rerouted_run(run_dir, cache, monkeypatch, before, *words, of=plan)
    assert_as_if_nothing_had_happened(run_dir, whole)
    assert len(events(run_dir, "rerouted")) == len(events(run_dir, "recovered")) == 1
    assert not events(run_dir, "disagreed")


@pytest.mark.nightly
def test_a_run_may_end_before_the_worker_is_back(
    tmp_path: Path, cache: Path, whole: list[float], monkeypatch: pytest.MonkeyPatch
):
    run_dir = tmp_path / "run"
    monkeypatch.setattr(
        "hetjax.launchers.local_processes.OnThisMachine.are_there",
        lambda launcher, some: False,
    )
    before: Before = {1: lambda driver: kill(run_dir, "right")}
    rerouted_run(run_dir, cache, monkeypatch, before)
    assert_as_if_nothing_had_happened(run_dir, whole)
    assert len(events(run_dir, "rerouted")) == 1
    assert not events(run_dir, "recovered")


@pytest.mark.nightly
def test_one_that_dies_again_before_it_has_called_is_started_and_waited_for(
    tmp_path: Path,
    cache: Path,
    whole: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    run_dir = tmp_path / "run"
    kill_right = lambda driver: kill(run_dir, "right")  # noqa: E731
    before: Before = {1: kill_right, 2: kill_right}
    rerouted_run(run_dir, cache, monkeypatch, before)
    assert "it is started once more" in capsys.readouterr().out
    assert_as_if_nothing_had_happened(run_dir, whole)
    assert len(events(run_dir, "rerouted")) == 1
    (recovered,) = events(run_dir, "recovered")
    assert recovered["started"] == ["right"] and recovered["lost_steps"] == 0
