# SPDX-License-Identifier: Apache-2.0
"""Runs on the nodes of a Slurm job and on ssh hosts, with kills.

Stand-ins for the programs that start workers run them on this machine, as the real ones
do (`tests/launchers/fake_programs.py`). `experiments/launchers` does the same with real
programs.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hetjax.launchers import on_machines
from hetjax.train import main
from hetjax.training.recovery.notice_sources import ask_to_leave
from tests.launchers import fake_programs
from tests.launchers.fake_programs import heard, processes
from tests.short_runs import draws
from tests.training.pair import (
    EVERY,
    STEPS,
    between_steps,
    nodes_of,
    trained,
    training,
    wait_until,
)
from tests.training.small import events
from tests.training.test_workers import losses

pytestmark = pytest.mark.usefixtures("environment")

WORKER = "hetjax.training.worker"
# environment variables that tell the two workers apart
WORKERS = {
    "slurm": ("SLURMD_NODENAME=small", "SLURMD_NODENAME=old"),
    "ssh": (
        "SSH_CONNECTION=127.0.0.1 9 127.0.0.2",
        "SSH_CONNECTION=127.0.0.1 9 127.0.0.3",
    ),
}
HOSTS = """
[[host]]
name = "left"
address = "127.0.0.2"
[[host]]
name = "right"
address = "127.0.0.3"
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    return fake_programs.put_on_path(tmp_path, monkeypatch)


def under(launcher: str, run_dir: Path, cache: Path, *options: str) -> list[str]:
    """Return the command line for a run on two nodes."""
    more = ["--launcher", launcher]
    if launcher == "ssh":
        hosts = run_dir.parent / "hosts.toml"
        hosts.write_text(HOSTS)
        more += ["--hosts", str(hosts)]
    return training(run_dir, cache, *more, *options)


def on_cpus(run_dir: Path) -> None:
    """Declare the file's nodes as CPUs; otherwise one node may stand in for two."""
    cluster = run_dir.parent / "pair.toml"
    cluster.write_text(re.sub('device = ".*"', 'device = "cpu"', cluster.read_text()))


def workers(programs: Path, *told: str) -> list[int]:
    """Return the workers that these programs started, with these variables."""
    return [pid for each in told for pid in processes([WORKER], each, str(programs))]


@pytest.mark.parametrize("launcher", draws(WORKERS, short=1))
def test_a_worker_that_is_killed_is_started_again_and_no_loss_changes(
    launcher: str,
    programs: Path,
    tmp_path: Path,
    cache: Path,
    whole: list[float],
    monkeypatch: pytest.MonkeyPatch,
):
    run_dir = tmp_path / "run"

    def kill() -> None:
        first, second = (workers(programs, told) for told in WORKERS[launcher])
        assert (len(first), len(second)) == (1, 1)
        os.kill(second[0], signal.SIGKILL)

    between_steps(monkeypatch, kill)
    assert main(under(launcher, run_dir, cache)) == 0
    assert losses(run_dir) == pytest.approx(whole, rel=1e-5)
    assert trained(run_dir) == [*STEPS]
    (recovered,) = events(run_dir, "recovered")
    assert (recovered["lost_steps"], recovered["step"]) == (0, EVERY)
    assert not workers(programs, *WORKERS[launcher])


@pytest.mark.nightly
def test_an_srun_that_is_killed_takes_its_worker_along_which_is_recovered(
    programs: Path,
    tmp_path: Path,
    cache: Path,
    whole: list[float],
    monkeypatch: pytest.MonkeyPatch,
):
    run_dir, told = tmp_path / "run", WORKERS["slurm"][1]

    def kill() -> None:
        (worker,) = workers(programs, told)
        client = min(processes(["--nodelist=old"], str(programs)))
        os.kill(client, signal.SIGKILL)
        wait_until(lambda: worker not in workers(programs, told))

    between_steps(monkeypatch, kill)
    assert main(under("slurm", run_dir, cache)) == 0
    assert losses(run_dir) == pytest.approx(whole, rel=1e-5)
    assert len(events(run_dir, "recovered")) == 1


def test_an_ssh_that_is_killed_changes_nothing_and_leaves_nothing(
    programs: Path,
    tmp_path: Path,
    cache: Path,
    whole: list[float],
    monkeypatch: pytest.MonkeyPatch,
):
    run_dir = tmp_path / "run"

    def kill() -> None:
        before = workers(programs, *WORKERS["ssh"])
        clients = processes([str(programs / "ssh")])
        assert len(before) == len(clients) == 2
        for client in clients:
            os.kill(client, signal.SIGKILL)

    between_steps(monkeypatch, kill)
    assert main(under("ssh", run_dir, cache)) == 0
    assert losses(run_dir) == pytest.approx(whole, rel=1e-5)
    assert not events(run_dir, "recovered")
    wait_until(lambda: not workers(programs, *WORKERS["ssh"]))


@pytest.mark.nightly
def test_a_node_that_goes_for_good_is_lost_and_the_run_goes_on_with_the_other(
    programs: Path,
    tmp_path: Path,
    cache: Path,
    whole: list[float],
    monkeypatch: pytest.MonkeyPatch,
):
    """As in a job with --no-kill, Slurm removes the node from the job's own list."""
    job = (programs / "scontrol.job").read_text()
    (programs / "scontrol.job").write_text(re.sub(r"GRES=gpu:\S+", "GRES=", job))

    def go() -> None:
        first = (programs / "scontrol.job").read_text().splitlines()[0]
        (programs / "scontrol.job").write_text(f"{first}\n")
        (programs / "srun.down").write_text("fast\n")
        (worker,) = workers(programs, "SLURMD_NODENAME=fast")
        os.kill(worker, signal.SIGKILL)

    run_dir = tmp_path / "run"
    between_steps(monkeypatch, go)
    words = under("slurm", run_dir, cache, "--no-simulate")
    on_cpus(run_dir)
    assert main(words) == 0
    assert losses(run_dir) == pytest.approx(whole, rel=1e-5)
    (recovered,) = events(run_dir, "recovered")
    assert (recovered["started"], nodes_of(run_dir)) == ([], {"left"})


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", draws(WORKERS, short=1))
def test_workers_far_away_end_when_their_controller_is_killed(
    launcher: str, programs: Path, tmp_path: Path, cache: Path
):
    words = under(launcher, tmp_path / "run", cache, "--steps", "100000")
    run = subprocess.Popen(
        [sys.executable, "-m", "hetjax.train", *words], stdout=subprocess.DEVNULL
    )
    wait_until(lambda: len(trained_so_far(tmp_path / "run")) > 1, 300.0)
    assert len(workers(programs, *WORKERS[launcher])) == 2
    run.kill()
    run.wait()
    wait_until(lambda: not workers(programs, *WORKERS[launcher]))


@pytest.mark.nightly
def test_a_host_that_goes_is_asked_for_and_taken_in_when_it_is_back(
    programs: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    run_dir, down = tmp_path / "run", programs / "ssh.down"
    monkeypatch.setattr(on_machines, "_EVERY_S", 0.2)  # check for it often
    command = tmp_path / "ask"
    command.write_text(f"#!/bin/sh\ncat >{tmp_path}/asked\nrm {down}\n")
    command.chmod(0o755)

    def go() -> None:
        down.write_text("127.0.0.3\n")
        (worker,) = workers(programs, WORKERS["ssh"][1])
        os.kill(worker, signal.SIGKILL)
        threading.Thread(target=stop_when_it_is_back).start()

    def stop_when_it_is_back() -> None:
        try:
            wait_until(lambda: len(events(run_dir, "recovered")) == 2, 120.0)
        finally:
            ask_to_leave(run_dir, None)

    between_steps(monkeypatch, go)
    options = ["--steps", "100000", "--no-simulate", "--reprovision", str(command)]
    words = under("ssh", run_dir, cache, *options)
    on_cpus(run_dir)
    assert main(words) == 4
    (asked,) = events(run_dir, "reprovisioned")
    assert (asked["nodes"], asked["code"]) == (["right"], 0)
    (missing,) = json.loads((tmp_path / "asked").read_text())["missing"]
    assert missing["name"] == "right"
    assert nodes_of(run_dir) == {"left", "right"}
    assert "reprovision" not in (run_dir / "config.json").read_text()


def trained_so_far(run_dir: Path) -> list[str]:
    path = run_dir / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.nightly
def test_a_run_goes_on_under_another_launcher(
    programs: Path, tmp_path: Path, cache: Path, whole: list[float]
):
    run_dir = tmp_path / "run"
    options = ["--checkpoint.every", str(EVERY)]
    assert main(under("ssh", run_dir, cache, *options, "--stop-after", str(EVERY))) == 4
    assert main(under("slurm", run_dir, cache, *options)) == 0
    assert losses(run_dir) == pytest.approx(whole, rel=1e-5)
    assert "--nodelist=old" in heard(programs, "srun")
