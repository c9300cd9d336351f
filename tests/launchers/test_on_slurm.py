# SPDX-License-Identifier: Apache-2.0
"""The launcher `slurm` in a job of three components: its cluster, words and errors."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.errors import BadInput
from hetjax.launchers import on_machines
from hetjax.launchers.slurm.end_notice import LISTENS, end_noticed
from hetjax.launchers.slurm.on_slurm import SlurmJob, find_cluster, run_on_nodes
from tests.launchers import fake_programs, far_cards
from tests.launchers.fake_programs import heard
from tests.training.pair import wait_until


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setattr(on_machines, "_PROBE", far_cards.__name__)
    return fake_programs.put_on_path(tmp_path, monkeypatch)


def test_the_cluster_is_what_the_job_has_as_its_cards_say_themselves(programs: Path):
    assert find_cluster(None) == Cluster(
        name="slurm",
        nodes=(
            Node(name="fast", device="A100-SXM4-80GB", count=2),
            Node(name="old", device="T4", count=1),
        ),
    )
    assert "--nodelist=small" not in heard(programs, "srun")  # it has none


def test_cards_that_cannot_be_looked_at_are_what_slurm_calls_them(programs: Path):
    (programs / "srun.down").write_text("fast\n")
    with pytest.warns(UserWarning, match="GPUs of fast cannot .*Node failure on fast"):
        nodes = find_cluster(None).nodes
    assert [node.device for node in nodes] == ["A100-SXM4-40GB", "T4"]


def test_a_command_runs_in_a_step_of_its_own_with_the_cards_of_its_node(
    programs: Path,
):
    cluster = Cluster(
        name="file",
        nodes=(
            Node(name="tesla", device="T4", count=1),
            Node(name="half", device="A100-SXM4-80GB", count=1),
        ),
    )
    run = run_on_nodes(cluster, None)
    done = run(cluster.node("tesla"), "tests.launchers.telling_variables", "", 60.0)
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["SLURMD_NODENAME"], told["CUDA_VISIBLE_DEVICES"]) == (
        "old",
        "GPU-old-0",
    )
    assert heard(programs, "srun")[-10:][:5] == [
        "--jobid=1",
        "--het-group=2",
        "--nodes=1",
        "--ntasks=1",
        "--nodelist=old",
    ]
    done = run(cluster.node("half"), "tests.launchers.telling_variables", "", 60.0)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["CUDA_VISIBLE_DEVICES"] == "GPU-fast-0"
    with pytest.raises(subprocess.TimeoutExpired):
        run(cluster.node("half"), "http.server", "0", 1.0)


def test_variables_reach_the_worker_whatever_slurm_sets_and_term_does_not(
    programs: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # as Slurm does in a step
    job = SlurmJob()
    machine = next(m for m in job.machines(looks=False) if m.id == "fast")
    place = job.place(machine, {"CUDA_VISIBLE_DEVICES": "GPU-x,GPU y"})
    assert place.address == "127.0.0.1"
    script = (
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM); "
        "print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['SLURMD_NODENAME'])"
    )
    done = subprocess.run(
        [*place.prefix, place.python, "-c", script], capture_output=True, text=True
    )
    assert (done.stdout, place.python) == ("GPU-x,GPU y fast\n", sys.executable)


def test_a_term_to_the_steps_of_the_job_is_one_to_the_run(
    programs: Path, monkeypatch: pytest.MonkeyPatch
):
    """Slurm tells a preemption to the steps, not to the script, which is the run."""
    monkeypatch.setenv("SLURMD_NODENAME", "old")
    job, told = SlurmJob(), threading.Event()
    job.machines(looks=False)
    words = job.listening()
    assert {"--nodelist=old", "--het-group=2"} <= {*words}
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    try:
        for is_sent in (False, True):
            with end_noticed(words):
                step = _step_on("old", programs)
                if is_sent:
                    os.kill(step, signal.SIGTERM)
                    # one long wait could miss a signal that comes as it begins
                    wait_until(told.is_set)
            assert told.is_set() == is_sent
            wait_until(lambda step=step: _has_ended(step))
    finally:
        signal.signal(signal.SIGTERM, before)


def _has_ended(pid: int) -> bool:
    """Return whether the process is gone, or nobody has asked for its exit code."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        )
    except (FileNotFoundError, ProcessLookupError):
        return True


def _step_on(node: str, programs: Path) -> int:
    """Return the process id of the listening step on the node, once it listens."""
    end_s = time.monotonic() + 10
    while time.monotonic() < end_s:
        told = f"SLURMD_NODENAME={node}\0", str(programs)
        for pid in fake_programs.processes(LISTENS[-1:], *told):
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended meanwhile
            caught = status.split("SigCgt:")[1]
            if int(caught.split()[0], 16) & 1 << (signal.SIGTERM - 1):
                return pid
        time.sleep(0.02)
    raise TimeoutError(f"no step on {node}")


def test_short_forms_of_names_are_spelled_out_and_nodes_that_are_down_left_out(
    programs: Path,
):
    job = (programs / "scontrol.job").read_text()
    node = (programs / "scontrol.node").read_text()
    first, _, last = job.splitlines()
    pair = last.replace("NodeList=old", "NodeList=a[1-2]")
    pair = pair.replace("Nodes=old", "Nodes=a[1-2]")
    (programs / "scontrol.job").write_text(f"{first}\n{pair}\n")
    lines = node.splitlines()
    one, two = (lines[2].replace("=old", f"=a{i}") for i in (1, 2))
    (programs / "scontrol.node").write_text("\n".join([lines[0], one, two]))
    whole = SlurmJob().machines(looks=False)
    assert [(m.id, m.device) for m in whole] == [
        ("small", "cpu"),
        ("a1", "T4"),
        ("a2", "T4"),
    ]
    gone = two.replace("State=MIXED", "State=DOWN*")
    (programs / "scontrol.node").write_text("\n".join([lines[0], one, gone]))
    assert [m.id for m in SlurmJob().machines(looks=False)] == ["small", "a1"]


def test_what_cannot_be_says_what_to_type(
    programs: Path, monkeypatch: pytest.MonkeyPatch
):
    lacking = Cluster(
        name="file", nodes=(Node(name="big", device="H100-80GB-HBM3", count=8),)
    )
    with pytest.raises(BadInput) as told:
        run_on_nodes(lacking, None)
    assert "'big' wants 8 x H100-80GB-HBM3" in told.value.got
    assert "2 x A100-SXM4-80GB (fast)" in told.value.got
    (programs / "scontrol.job").unlink()
    with pytest.raises(BadInput, match="scontrol show job: cat: .*No such file"):
        find_cluster(None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BadInput, match="no srun on this machine"):
        find_cluster(None)
    for value in ("", "1; rm"):
        monkeypatch.setenv("SLURM_JOB_ID", value)
        with pytest.raises(BadInput, match="outside of a Slurm job") as told:
            find_cluster(None)
        assert told.value.fix.startswith("hetjax launch slurm")
