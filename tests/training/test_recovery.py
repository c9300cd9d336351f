# SPDX-License-Identifier: Apache-2.0
"""Workers that are killed while they train: the run ends as if undisturbed.

`python -m experiments.recovery.kills` is the longer run.
"""

import random
import threading
import time
from pathlib import Path

import pytest

from hetjax.preempt import main as preempt
from hetjax.train import main
from hetjax.training.observers.records import (
    EndRecord,
    LostRecord,
    RecoveredRecord,
    StepRecord,
)
from hetjax.training.recovery.membership import Membership
from tests.training.observers.seen import MODULE, SEEN, Seen
from tests.training.pair import (
    NODES,
    ONE_NODE,
    ONE_REPLICA,
    PATIENCE_S,
    STEPS,
    TWO_NODES,
    between_steps,
    kill,
    nodes_of,
    on_nodes,
    process_of,
    trained,
    training,
    wait_until,
)
from tests.training.small import events
from tests.training.test_workers import losses, processes_of

pytestmark = pytest.mark.usefixtures("environment")

NO_CHECKPOINT = ["--checkpoint.every", "0"]


def test_with_a_replica_left_no_step_is_lost_and_every_number_is_the_same(
    tmp_path: Path, cache: Path, whole: list[float], monkeypatch: pytest.MonkeyPatch
):
    run_dir, random_ = tmp_path / "run", random.Random(0)

    def kill_some() -> None:
        for longest_s in (0.2, 3.0):  # in a step, then during recovery or later
            time.sleep(random_.uniform(0.0, longest_s))
            worker = random_.choice(NODES)
            if process_of(run_dir, worker) is not None:
                kill(run_dir, worker)

    killer = threading.Thread(target=kill_some)
    between_steps(monkeypatch, lambda: kill(run_dir, "right"), killer.start)
    assert main(training(run_dir, cache)) == 0
    killer.join()
    assert losses(run_dir) == whole
    recovered, *_ = events(run_dir, "recovered")
    assert "right" in recovered["reason"] and recovered["lost_steps"] == 0
    # all layers with their two moments, from the other replica's memory
    assert recovered["bytes"].keys() == {"peer"} and recovered["bytes"]["peer"] > 0
    assert not processes_of(run_dir)


def test_without_a_replica_it_goes_on_from_the_newest_checkpoint(
    tmp_path: Path, cache: Path, whole: list[float], monkeypatch: pytest.MonkeyPatch
):
    run_dir = tmp_path / "run"
    between_steps(monkeypatch, lambda: kill(run_dir, "left"))
    observed = ["--observer", f"{MODULE}:SEEN"]
    assert main(training(run_dir, cache, *observed, of=ONE_REPLICA)) == 0
    assert losses(run_dir) == pytest.approx(whole, rel=1e-5)
    (recovered,) = events(run_dir, "recovered")
    assert recovered["step"] % 2 == 0 and recovered["bytes"].keys() <= {"disk"}
    assert_saw_a_loss(SEEN, "left", recovered["step"])


def assert_saw_a_loss(seen: Seen, worker: str, step: int) -> None:
    """Assert records of the loss, the recovery to this step, and all later steps."""
    at = seen.methods.index("on_lost")
    lost, recovered, *rest = seen.records[at:]
    assert isinstance(lost, LostRecord) and lost.worker == worker and lost.step >= step
    assert isinstance(recovered, RecoveredRecord) and recovered.step == step
    again = [each.step for each in rest if isinstance(each, StepRecord)]
    assert again == [*range(step + 1, len(STEPS) + 1)]
    assert rest[-1] == EndRecord(step=len(STEPS), outcome="finished")


def test_recovery_none_ends_the_run_and_names_the_worker(
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    run_dir = tmp_path / "run"
    between_steps(monkeypatch, lambda: kill(run_dir, "left"))
    assert main(training(run_dir, cache, "--recovery", "none")) == 1
    told = capsys.readouterr().err
    assert "got: worker 'left'" in told and "from the last checkpoint" in told
    assert not processes_of(run_dir)


def test_a_node_joins_once_it_is_in_the_cluster_file_and_leaves_when_asked_to(
    tmp_path: Path, cache: Path, whole: list[float], monkeypatch: pytest.MonkeyPatch
):
    run_dir, cluster = tmp_path / "run", tmp_path / "pair.toml"
    seen, left = list[set[str]](), heard(monkeypatch)

    def join() -> None:
        seen.append(nodes_of(run_dir))
        cluster.write_text(TWO_NODES)

    def leave() -> None:
        seen.append(nodes_of(run_dir))
        assert preempt([str(run_dir), "--node", "right"]) == 0
        assert left.wait(PATIENCE_S)

    options = on_nodes(run_dir, cache, "--planner", "even", cluster=ONE_NODE)
    between_steps(monkeypatch, join, leave)
    assert main([*options, *NO_CHECKPOINT]) == 0
    assert losses(run_dir) == pytest.approx(whole, rel=1e-5)
    assert [*seen, nodes_of(run_dir)] == [{"left"}, {"left", "right"}, {"left"}]
    came, went = events(run_dir, "recovered")
    assert came["lost_steps"] == went["lost_steps"] == 0
    assert 'name = "right"' not in (run_dir / "cluster.toml").read_text()


def heard(patched: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set once the run knows that a node is to leave."""
    done, leave = threading.Event(), Membership.leave

    def telling(self: Membership, node: str) -> bool:
        found = leave(self, node)
        done.set()
        return found

    patched.setattr(Membership, "leave", telling)
    return done


@pytest.mark.nightly
def test_cloud_only_takes_everything_from_the_store(
    tmp_path: Path, cache: Path, whole: list[float], monkeypatch: pytest.MonkeyPatch
):
    run_dir, store = tmp_path / "run", tmp_path / "store"

    def kill_once_stored() -> None:
        wait_until(lambda: list(store.glob("step_*/COMMIT")))
        kill(run_dir, "left")

    between_steps(monkeypatch, kill_once_stored)
    cloud = ["--recovery", "cloud-only", "--checkpoint.cloud", store.as_uri()]
    every = ["--checkpoint.every", "1"]
    assert main(training(run_dir, cache, *cloud, *every, of=ONE_REPLICA)) == 0
    assert losses(run_dir) == pytest.approx(whole, rel=1e-5)
    (recovered,) = events(run_dir, "recovered")
    assert recovered["step"] > 0 and recovered["bytes"].keys() == {"cloud"}
    assert trained(run_dir) == [*STEPS]
