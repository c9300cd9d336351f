# SPDX-License-Identifier: Apache-2.0
"""A worker is lost and its replica's samples are taken over, until it is back."""

from pathlib import Path

import pytest

from hetjax.elastic.driver import Driver
from hetjax.runtime.execution.commit import StepCommit
from hetjax.train import main
from tests.training.pair import STEPS, kill, trained, training, wait_until
from tests.training.small import events
from tests.training.test_workers import losses, processes_of

pytestmark = pytest.mark.usefixtures("environment")


@pytest.mark.parametrize("waits", [True, False], ids=["comes back", "ends before"])
def test_others_train_on_the_samples_of_a_killed_worker_until_it_is_back(
    tmp_path: Path,
    cache: Path,
    whole: list[float],
    monkeypatch: pytest.MonkeyPatch,
    waits: bool,
):
    run_dir, step = tmp_path / "run", Driver.step
    to_kill = ["right"]

    def step_and_do(driver: Driver, number: int, *, traced: bool = False) -> StepCommit:
        if number == 1 and to_kill:
            kill(run_dir, to_kill.pop())
        if number == 4 and waits:
            there = driver._controller.connections
            wait_until(lambda: "right" in there.workers)
        return step(driver, number, traced=traced)

    monkeypatch.setattr(Driver, "step", step_and_do)
    assert main(training(run_dir, cache, "--reroute")) == 0
    assert trained(run_dir) == [*STEPS]
    assert losses(run_dir) == pytest.approx(whole, rel=1e-5)
    (rerouted,) = events(run_dir, "rerouted")
    assert rerouted["step"] == 1 and rerouted["replicas"] == [1]
    assert "right" in rerouted["reason"]
    recovered = events(run_dir, "recovered")
    assert len(recovered) == waits
    for found in recovered:
        assert found["step"] == 4 and found["gone"] == ["right"]
        assert found["lost_steps"] == 0 and found["bytes"].keys() <= {"peer", "disk"}
    assert not processes_of(run_dir)
