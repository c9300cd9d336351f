# SPDX-License-Identifier: Apache-2.0
"""Workers whose own machines are about to go, each with a metadata server of its own.

That a worker is on another machine than the controller is told by its address.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from hetjax.runtime.fleet import FleetStep
from hetjax.train import main
from hetjax.training import starting
from hetjax.training.elastic import FleetDriver
from hetjax.training.launching import OnThisMachine, Place
from hetjax.training.rundir import LOGS
from tests.training.small import events
from tests.training.test_notices import GCE, Cloud, serving_google
from tests.training.test_recovery import ONE_REPLICA, TWO_NODES, metrics
from tests.training.test_workers import (
    command,
    environment,
    losses,
    processes_of,
    set_environment,
)

__all__ = ["environment"]

PREEMPTED = f"{GCE}preempted"
PATIENCE_S = 30.0
HEARD_AFTER = 2  # steps
NODES = ("left", "right")
ELSEWHERE = {"left": "127.0.0.2", "right": "127.0.0.3"}


def training(folder: Path, run_dir: Path, *options: str) -> list[str]:
    """Two nodes, each with half of the layers and nothing saved on any disk."""
    plan, cluster = folder / "plan.json", folder / "pair.toml"
    plan.write_text(json.dumps(ONE_REPLICA))
    cluster.write_text(TWO_NODES)
    same = ["--steps", "6", "--global-batch", "8", "--checkpoint.every", "0"]
    same += ["--plan", str(plan), "--cluster", str(cluster)]
    return command(run_dir, folder / "cache", *same, *options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What the run tells in one process."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patched:
        set_environment(patched)
        assert main(training(folder, folder / "run")) == 0
    return losses(folder / "run")


@contextmanager
def machines(
    patched: pytest.MonkeyPatch, addresses: dict[str, str]
) -> Iterator[dict[str, Cloud]]:
    """Start workers at these addresses; what each one's metadata server says."""
    with ExitStack() as stack:
        clouds, places = {}, {}
        for worker, address in addresses.items():
            clouds[worker], host = stack.enter_context(serving_google())
            script = f'GCE_METADATA_HOST={host} "$@"; echo "ended with code $?"'
            prefix = ("sh", "-c", script, "sh")
            places[worker] = Place(prefix=prefix, address=address)
        launcher = partial(OnThisMachine, places=places)
        patched.setattr(starting, "OnThisMachine", launcher)
        yield clouds


def between_steps(patched: pytest.MonkeyPatch, do: Callable[[], None]) -> None:
    """Do this once, while all workers wait for their next request."""
    step = FleetDriver.step

    def step_and_do(
        driver: FleetDriver, number: int, *, traced: bool = False
    ) -> FleetStep:
        found = step(driver, number, traced=traced)
        if number + 1 == HEARD_AFTER:
            do()
        return found

    patched.setattr(FleetDriver, "step", step_and_do)


def wait_until_noticed(run_dir: Path, count: int) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while len(events(run_dir, "noticed")) < count:
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.mark.usefixtures("environment")
def test_a_worker_whose_machine_goes_hands_over_and_the_others_go_on(
    tmp_path: Path,
    whole: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    run_dir = tmp_path / "run"
    here = {"left": "127.0.0.2", "right": "127.0.0.1"}
    with machines(monkeypatch, here) as clouds:

        def preempt() -> None:
            clouds["left"].values[PREEMPTED] = "TRUE"
            wait_until_noticed(run_dir, 1)

        between_steps(monkeypatch, preempt)
        assert main(training(tmp_path, run_dir, "--launcher", "processes")) == 0
    assert losses(run_dir) == pytest.approx(whole, rel=1e-5)
    assert [m["step"] for m in metrics(run_dir) if "loss" in m] == [*range(1, 7)]
    (noticed,) = events(run_dir, "noticed")
    told = [noticed[name] for name in ("node", "source", "grace_s", "step")]
    assert told == ["left", "Google Compute Engine", 30.0, HEARD_AFTER]
    assert "Google Compute Engine: node 'left' goes in 30 s" in capsys.readouterr().out
    (recovered,) = events(run_dir, "recovered")
    # nobody else had its layers, and no disk
    assert recovered["bytes"].keys() == {"memory", "peer"}
    assert recovered["lost_steps"] == 0 < recovered["bytes"]["peer"]
    assert (recovered["step"], recovered["gone"]) == (HEARD_AFTER, [])
    plan = json.loads((run_dir / "plan.json").read_text())
    assert {s["node"] for r in plan["replicas"] for s in r["stages"]} == {"right"}
    for node in NODES:
        log = (run_dir / LOGS / f"{node}.log").read_text()
        assert log == "ended with code 0\n"
    assert clouds["right"].num_asked == 0  # that machine is the controller's to watch
    assert not processes_of(run_dir)


@pytest.mark.usefixtures("environment")
def test_a_run_all_of_whose_machines_go_saves_and_goes_on_later(
    tmp_path: Path, whole: list[float], monkeypatch: pytest.MonkeyPatch
):
    run_dir = tmp_path / "run"
    options = training(tmp_path, run_dir, "--launcher", "processes")
    with machines(monkeypatch, ELSEWHERE) as clouds:

        def preempt() -> None:
            for cloud in clouds.values():
                cloud.values[PREEMPTED] = "TRUE"
            wait_until_noticed(run_dir, len(clouds))

        between_steps(monkeypatch, preempt)
        assert main(options) == 4
        noticed = events(run_dir, "noticed")
        assert sorted(each["node"] for each in noticed) == sorted(NODES)
        (preempted,) = events(run_dir, "preempted")
        told = [preempted[name] for name in ("reason", "grace_s", "step")]
        assert told == ["Google Compute Engine", 30.0, HEARD_AFTER]
        assert not processes_of(run_dir)
        for cloud in clouds.values():
            cloud.values[PREEMPTED] = "FALSE"
        assert main(options) == 0
    assert losses(run_dir) == pytest.approx(whole, rel=1e-5)
    (restored,) = events(run_dir, "restored")
    assert restored["step"] == HEARD_AFTER
    assert not events(run_dir, "recovered")


@pytest.mark.usefixtures("environment")
def test_a_node_whose_worker_does_not_start_again_is_left_out(
    tmp_path: Path,
    whole: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    run_dir, broken = tmp_path / "run", tmp_path / "broken"
    script = f'[ -e {broken} ] && exit 1; exec "$@"'
    places = {"right": Place(prefix=("sh", "-c", script, "sh"))}
    launcher = partial(OnThisMachine, places=places)
    monkeypatch.setattr(starting, "OnThisMachine", launcher)

    def break_down() -> None:
        broken.touch()
        for pid in processes_of(run_dir):
            if Path(f"/proc/{pid}/fd/1").resolve().stem == "right":
                os.kill(pid, signal.SIGKILL)

    between_steps(monkeypatch, break_down)
    options = training(tmp_path, run_dir, "--launcher", "processes")
    assert main(options) == 0
    assert "node right was lost 3 times" in capsys.readouterr().out
    assert losses(run_dir)[-1] == pytest.approx(whole[-1], rel=1e-5)
    (recovered,) = events(run_dir, "recovered")
    assert recovered["step"] == 0  # its layers were nowhere else
    plan = json.loads((run_dir / "plan.json").read_text())
    assert {s["node"] for r in plan["replicas"] for s in r["stages"]} == {"left"}
