# SPDX-License-Identifier: Apache-2.0
"""A run reports a slow worker, plans accordingly, and reports its recovery."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.cluster_files import load_cluster
from hetjax.costs.slowness.known import read_slowness, slowness, write_slowness
from hetjax.launchers.local_processes import OnThisMachine
from hetjax.runtime.execution.commit import StepCommit
from hetjax.train import main
from hetjax.training.layout.plan_choice import next_plan, read_run_slowness
from hetjax.training.observers import slow_devices
from hetjax.training.observers.slow_devices import SlowDevices, watches
from hetjax.training.recovery.driver import Driver
from tests.training.pair import ONE_REPLICA, training
from tests.training.slow_worker import FOLDER
from tests.training.small import (
    MODEL,
    ONE_STAGE,
    SIX,
    TWO_REPLICAS,
    events,
    small_preset,
)

# two equal nodes, and a model too small to be shared by them
EQUAL = Cluster(
    name="equal", nodes=tuple(Node(name=n, device="L4", count=1) for n in ("a", "b"))
)
SLOW_FROM, LAST = 30, 300  # steps
FACTOR = 3.0


def told(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """Return the events about nodes; slowness common to all is the busy machine's."""
    return [e for e in events(run_dir, name) if e["what"] == "node"]


@pytest.mark.parametrize("slow", ["a", "b"])
def test_the_next_plan_goes_to_nodes_that_are_not_slow(tmp_path: Path, slow: str):
    preset = small_preset(tmp_path)
    config = replace(preset.config, planner="hetjax", run_dir=tmp_path)
    write_slowness(tmp_path / "slow.json", slowness({slow: 30.0}, {}))
    known = read_run_slowness(config)
    found = next_plan(config, MODEL, EQUAL, ONE_STAGE, known)
    assert found.nodes == {"a", "b"} - {slow}


@pytest.mark.parametrize(
    ("asked", "is_simulated", "watched"),
    [("auto", True, False), ("auto", False, True), ("on", True, True)],
)
def test_simulated_devices_are_watched_if_asked_for(
    asked: Literal["auto", "on"], is_simulated: bool, watched: bool, tmp_path: Path
):
    config = replace(
        small_preset(tmp_path).config, watch_speeds=asked, simulate=is_simulated
    )
    assert watches(config) is watched


def test_steps_are_timed_as_often_as_a_hundredth_of_them_pays_for(tmp_path: Path):
    watching = SlowDevices(is_on=True, path=tmp_path / "slow.json")
    watching.begin(TWO_REPLICAS, load_cluster(SIX))

    def timed(step: int) -> bool:
        watching.before(step)
        return watching.timing.is_wanted

    watching.after(10.0, None)
    assert all(map(timed, range(10)))
    cost_s = watching.timing_cost_s
    for _ in range(3):  # the first steps are learnt
        watching.after(50 * cost_s, None)
        assert all(map(timed, range(10)))
    watching.after(50 * cost_s, None)
    assert sum(map(timed, range(10))) == 5
    watching.after(1e-3, None)
    assert 0 < sum(map(timed, range(1000))) < 10
    watching.begin(TWO_REPLICAS, load_cluster(SIX))
    watching.after(50 * cost_s, None)
    assert all(map(timed, range(10)))


@pytest.mark.nightly
@pytest.mark.usefixtures("environment")
def test_a_throttled_worker_is_named_counted_and_forgiven(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    run_dir, factors = tmp_path / "run", tmp_path / "factors"
    factors.mkdir()
    monkeypatch.setenv(FOLDER, str(factors))
    defaults = OnThisMachine.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "module", "tests.training.slow_worker")
    # else only some of such short steps would be timed
    monkeypatch.setattr(slow_devices, "_MOST_SHARE", 1.0)
    step, known = Driver.step, []

    def step_and_look(
        driver: Driver, number: int, *, traced: bool = False
    ) -> StepCommit:
        done = step(driver, number, traced=traced)
        if number == SLOW_FROM:
            (factors / "right").write_text(str(FACTOR))
        if told(run_dir, "slow") and (factors / "right").exists():
            known.append(read_slowness(run_dir / "slow.json"))
            (factors / "right").unlink()
        if told(run_dir, "as_before") or number == LAST:
            os.kill(os.getpid(), signal.SIGINT)
        return done

    monkeypatch.setattr(Driver, "step", step_and_look)
    options = ["--steps", "1000", "--checkpoint.every", "0", "--watch-speeds", "on"]
    assert main(training(run_dir, cache, *options, of=ONE_REPLICA)) == 4
    [slow] = told(run_dir, "slow")
    [over] = told(run_dir, "as_before")
    assert slow["who"] == over["who"] == "right"
    assert SLOW_FROM < slow["since"] <= slow["step"] < over["since"]
    # only the sleeps are slower, not the computation, which a busy machine extends
    assert 1.25 < slow["factor"] < 1.2 * FACTOR
    assert known[0].factor("right") == pytest.approx(slow["factor"], rel=0.3)
    assert (
        known[0].factor("left")
        == read_slowness(run_dir / "slow.json").factor("right")
        == 1
    )
    log = (run_dir / "log.txt").read_text()
    assert "slow: right " in log and "recovered: right as before" in log
