# SPDX-License-Identifier: Apache-2.0
"""A worker is lost and its replica's samples are taken over, until it is back."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hetjax.elastic.driver import Driver
from hetjax.runtime.execution.commit import StepCommit
from hetjax.train import main
from tests.training.pair import STEPS, kill, trained, training, wait_until
from tests.training.small import events
from tests.training.test_workers import losses, processes_of

pytestmark = pytest.mark.usefixtures("environment")
Before = dict[int, Callable[[Driver], object]]  # steps, what is done first


def rerouted_run(
    run_dir: Path, cache: Path, patched: pytest.MonkeyPatch, before: Before
) -> None:
    step = Driver.step

    def do_and_step(driver: Driver, number: int, *, traced: bool = False) -> StepCommit:
        if number in before:
            before.pop(number)(driver)
        return step(driver, number, traced=traced)

    patched.setattr(Driver, "step", do_and_step)
    assert main(training(run_dir, cache, "--reroute")) == 0
    assert not processes_of(run_dir)


def assert_as_if_nothing_had_happened(run_dir: Path, whole: list[float]) -> None:
    assert trained(run_dir) == [*STEPS]
    assert losses(run_dir) == pytest.approx(whole, rel=1e-5)


def has_called(driver: Driver) -> None:
    wait_until(lambda: "right" in driver._controller.connections.workers)


def has_compiled(driver: Driver) -> None:
    wait_until(lambda: driver._controller.are_compiled(["right"]))


def test_others_train_on_the_samples_of_a_killed_worker_until_it_is_back(
    tmp_path: Path, cache: Path, whole: list[float], monkeypatch: pytest.MonkeyPatch
):
    run_dir = tmp_path / "run"
    before: Before = {
        1: lambda driver: kill(run_dir, "right"),
        3: has_called,
        4: has_compiled,
    }
    rerouted_run(run_dir, cache, monkeypatch, before)
    assert_as_if_nothing_had_happened(run_dir, whole)
    (rerouted,) = events(run_dir, "rerouted")
    assert rerouted["step"] == 1 and rerouted["replicas"] == [1]
    assert "right" in rerouted["reason"]
    (recovered,) = events(run_dir, "recovered")
    assert 2 <= recovered["step"] <= 4 and recovered["gone"] == ["right"]
    assert recovered["lost_steps"] == 0
    assert recovered["bytes"].keys() <= {"peer", "disk"}


def test_a_run_may_end_before_the_worker_is_back(
    tmp_path: Path, cache: Path, whole: list[float], monkeypatch: pytest.MonkeyPatch
):
    run_dir = tmp_path / "run"
    monkeypatch.setattr(
        "hetjax.launch.launching.OnThisMachine.are_there", lambda launcher, some: False
    )
    before: Before = {1: lambda driver: kill(run_dir, "right")}
    rerouted_run(run_dir, cache, monkeypatch, before)
    assert_as_if_nothing_had_happened(run_dir, whole)
    assert len(events(run_dir, "rerouted")) == 1
    assert not events(run_dir, "recovered")


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
    assert recovered["gone"] == ["right"] and recovered["lost_steps"] == 0
