# SPDX-License-Identifier: Apache-2.0
"""Workers whose machines are about to go, each with its own metadata server.

The address of a worker tells that it is on another machine than the controller.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from hetjax.launchers import local_processes
from hetjax.launchers.local_processes import OnThisMachine, WorkerPlace
from hetjax.train import main
from hetjax.training.directory.rundir import LOGS
from tests.training.pair import (
    EVERY,
    NODES,
    ONE_REPLICA,
    STEPS,
    between_steps,
    kill,
    nodes_of,
    trained,
    training,
    wait_until,
)
from tests.training.recovery.test_notices import GCE, Cloud, serving_google
from tests.training.small import events
from tests.training.test_workers import losses, processes_of

pytestmark = pytest.mark.usefixtures("environment")

PREEMPTED = f"{GCE}preempted"
ELSEWHERE = {"left": "127.0.0.2", "right": "127.0.0.3"}


def halves(run_dir: Path, cache: Path) -> list[str]:
    """Return the words of a run with half of the layers per node and no saves."""
    return training(run_dir, cache, "--checkpoint.every", "0", of=ONE_REPLICA)


@contextmanager
def machines(
    patched: pytest.MonkeyPatch, addresses: dict[str, str]
) -> Iterator[dict[str, Cloud]]:
    """Start workers at these addresses; yield the metadata server of each."""
    with ExitStack() as stack:
        clouds, places = {}, {}
        for worker, address in addresses.items():
            clouds[worker], host = stack.enter_context(serving_google())
            script = f'GCE_METADATA_HOST={host} "$@"; echo "ended with code $?"'
            prefix = ("sh", "-c", script, "sh")
            places[worker] = WorkerPlace(prefix=prefix, address=address)
        launcher = partial(OnThisMachine, places=places)
        patched.setattr(local_processes, "OnThisMachine", launcher)
        yield clouds


def test_a_worker_whose_machine_goes_hands_over_and_the_others_go_on(
    tmp_path: Path,
    cache: Path,
    whole: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    run_dir = tmp_path / "run"
    here = {"left": "127.0.0.2", "right": "127.0.0.1"}
    with machines(monkeypatch, here) as clouds:

        def preempt() -> None:
            clouds["left"].values[PREEMPTED] = "TRUE"
            wait_until(lambda: events(run_dir, "noticed"))

        between_steps(monkeypatch, preempt)
        assert main(halves(run_dir, cache)) == 0
    assert losses(run_dir) == pytest.approx(whole, rel=1e-5)
    assert trained(run_dir) == [*STEPS]
    (noticed,) = events(run_dir, "noticed")
    told = [noticed[name] for name in ("node", "source", "grace_s", "step")]
    assert told == ["left", "Google Compute Engine", 30.0, EVERY]
    assert (
        "Google Compute Engine: node 'left' leaves in 30 s" in capsys.readouterr().out
    )
    (recovered,) = events(run_dir, "recovered")
    # no other worker and no disk had its layers
    assert recovered["bytes"].keys() == {"memory", "peer"}
    assert recovered["lost_steps"] == 0 < recovered["bytes"]["peer"]
    assert (recovered["step"], recovered["started"]) == (EVERY, [])
    assert nodes_of(run_dir) == {"right"}
    for node in NODES:
        log = (run_dir / LOGS / f"{node}.log").read_text()
        assert log == "ended with code 0\n"
    assert clouds["right"].num_asked == 0  # the controller watches that machine
    assert not processes_of(run_dir)


@pytest.mark.nightly
def test_a_run_all_of_whose_machines_go_saves_and_goes_on_later(
    tmp_path: Path, cache: Path, whole: list[float], monkeypatch: pytest.MonkeyPatch
):
    run_dir = tmp_path / "run"
    options = halves(run_dir, cache)
    with machines(monkeypatch, ELSEWHERE) as clouds:

        def preempt() -> None:
            for cloud in clouds.values():
                cloud.values[PREEMPTED] = "TRUE"
            wait_until(lambda: len(events(run_dir, "noticed")) == len(clouds))

        between_steps(monkeypatch, preempt)
        assert main(options) == 4
        noticed = events(run_dir, "noticed")
        assert sorted(each["node"] for each in noticed) == sorted(NODES)
        (preempted,) = events(run_dir, "preempted")
        told = [preempted[name] for name in ("reason", "grace_s", "step")]
        assert told == ["Google Compute Engine", 30.0, EVERY]
        assert not processes_of(run_dir)
        for cloud in clouds.values():
            cloud.values[PREEMPTED] = "FALSE"
        assert main(options) == 0
    assert losses(run_dir) == pytest.approx(whole, rel=1e-5)
    (restored,) = events(run_dir, "restored")
    assert restored["step"] == EVERY
    assert not events(run_dir, "recovered")


@pytest.mark.nightly
def test_a_node_whose_worker_does_not_start_again_is_left_out(
    tmp_path: Path,
    cache: Path,
    whole: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    run_dir, broken = tmp_path / "run", tmp_path / "broken"
    script = f'[ -e {broken} ] && exit 1; exec "$@"'
    places = {"right": WorkerPlace(prefix=("sh", "-c", script, "sh"))}
    launcher = partial(OnThisMachine, places=places)
    monkeypatch.setattr(local_processes, "OnThisMachine", launcher)

    def break_down() -> None:
        broken.touch()
        kill(run_dir, "right")

    between_steps(monkeypatch, break_down)
    options = halves(run_dir, cache)
    assert main(options) == 0
    assert "node right was lost 3 times" in capsys.readouterr().out
    assert losses(run_dir)[-1] == pytest.approx(whole[-1], rel=1e-5)
    (recovered,) = events(run_dir, "recovered")
    assert recovered["step"] == 0  # no other place had its layers
    assert nodes_of(run_dir) == {"left"}
