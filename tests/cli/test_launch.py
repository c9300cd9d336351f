# SPDX-License-Identifier: Apache-2.0
"""`hetjax launch`: a job's script as sbatch and a shell read it, and bad input."""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetjax.__main__ import main
from hetjax.cluster.cluster_files import load_cluster
from hetjax.launchers import on_machines
from tests.launchers import fake_programs, far_cards
from tests.launchers.fake_programs import heard

CLUSTER = """
name = "lab"
[[node]]
name = "a"
device = "A100-SXM4-40GB"
count = 2
[[node]]
name = "c"
device = "T4"
count = 4
hosts = 2
[[node]]
name = "b"
device = "A100-SXM4-40GB"
count = 2
[[node]]
name = "host"
device = "cpu"
count = 1
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab.toml").write_text(CLUSTER)
    return fake_programs.put_on_path(tmp_path, monkeypatch)


def launch(*words: str) -> int:
    return main(["launch", *words])


def components(script: str) -> list[list[str]]:
    """Return what sbatch reads of a script, by component."""
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    found: list[list[str]] = [[]]
    for line in lines:
        (word,) = shlex.split(line.removeprefix("#SBATCH "))
        if word == "hetjob":
            found.append([])
        else:
            found[-1].append(word)
    return found


def test_like_nodes_are_one_component_and_each_asks_for_its_cards(
    programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run_dir = "runs/it's 50% $HOME"
    words = ["slurm", "lab.toml", "--time", "1-0", "--sbatch", "account=me"]
    words += ["--dry-run", "--", "train", "tiny", "--run-dir", run_dir]
    assert launch(*words) == 0
    path = tmp_path / f"{run_dir}.slurm.sh"
    assert path.read_text() in capsys.readouterr().out
    assert not (tmp_path / run_dir).exists()
    first, second, third = components(path.read_text())
    output = f"--output={tmp_path}/runs/it's 50%% $HOME.slurm-%j.out"
    assert {"--open-mode=append", "--signal=B:USR1@300", output} <= {*first}
    each = {"--requeue", "--no-kill", "--time=1-0", "--account=me"}
    for component, own in (
        (first, {"--nodes=2", "--gres=gpu:a100:2", "--cpus-per-task=8"}),
        (second, {"--nodes=2", "--gres=gpu:t4:2", "--cpus-per-task=8"}),
        (third, {"--nodes=1", "--cpus-per-task=4"}),
    ):
        assert each | own | {"--ntasks-per-node=1"} <= {*component}
    assert not [option for option in third if "gres" in option]


SCRIPTED = """#!/bin/sh
printf '%s\\n' "$@" >words
touch begun
trap 'exit 4' TERM
while [ ! -e end ]; do
    [ ! -e saved ] || exit 4
    sleep 0.05
done
exit 3
"""


@pytest.mark.parametrize(
    ("signal", "preempted", "code", "requeued"),
    [
        ("USR1", False, 0, True),
        ("TERM", False, 4, False),
        ("TERM", True, 4, False),  # scancel, during the grace
        ("", False, 3, False),
        ("to the run", True, 0, True),
        ("to the run", False, 4, False),  # hetjax preempt
        ("", True, 3, False),
    ],
)
def test_a_job_goes_back_into_the_queue_after_the_notice_alone(
    signal: str,
    preempted: bool,
    code: int,
    requeued: bool,
    programs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    if preempted:
        (programs / "scontrol.preempted").write_text("PreemptTime=2026-11-29T05:21:02")
    (tmp_path / "python $x").write_text(SCRIPTED)
    (tmp_path / "python $x").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python $x"))
    train = ["tiny", "--run-dir", "a run", "--data.path", "a;b 'c'"]
    assert launch("slurm", "lab.toml", "--dry-run", "--", "train", *train) == 0
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    job = subprocess.Popen(["bash", str(tmp_path / "a run.slurm.sh")], cwd="/")
    while not (tmp_path / "begun").exists():
        assert job.poll() is None
        time.sleep(0.02)
    if signal == "to the run":
        (tmp_path / "saved").touch()
    elif signal:
        subprocess.run(["kill", f"-{signal}", str(job.pid)], check=True)
    else:
        (tmp_path / "end").touch()
    assert job.wait(30) == code
    assert heard(programs, "scontrol") == (["requeue 1"] if requeued else [])
    cluster = str(tmp_path / "lab.toml")
    added = ["--launcher", "slurm", "--cluster", cluster]
    words = (tmp_path / "words").read_text().splitlines()
    assert words == ["-m", "hetjax.train", *train, *added]


def test_what_slurm_refuses_says_what_to_compare(
    programs: Path, capsys: pytest.CaptureFixture[str]
):
    why = "Requested node configuration is not available"
    (programs / "sbatch").write_text(f"#!/bin/sh\necho 'error: {why}' >&2\nexit 1\n")
    assert launch("slurm", "lab.toml", "--", "train", "tiny") == 2
    error = capsys.readouterr().err
    assert why in error and "sinfo -N" in error and "--cpus-per-device" in error


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["kubernetes"], "launch kubernetes"),
        (["slurm"], "without a command to run"),
        (["slurm", "lab.toml", "train", "tiny"], "without a command to run"),
        (["slurm", "lab.toml", "--", "eval", "runs/a"], "eval runs/a after --"),
        (["slurm", "none.toml", "--", "train", "tiny"], "none.toml"),
        (["slurm", "lab.toml", "--", "train", "tini"], "tini"),
        (["slurm", "lab.toml", "--", "train", "tiny", "--launcher=ray"], "--launcher"),
        (["slurm", "lab.toml", "--", "train", "tiny", "--cluster", "x"], "--cluster"),
        (["slurm", "lab.toml", "--tiem", "5", "--", "train", "tiny"], "--tiem"),
        (["slurm", "lab.toml", "--time", "soon", "--", "train", "tiny"], "soon"),
        (["slurm", "lab.toml", "--time", "5", "--", "train", "tiny"], "--time 5 with"),
        (["slurm", "lab.toml", "--notice-s", "0", "--", "train", "tiny"], "notice-s 0"),
        (["slurm", "lab.toml", "--sbatch", "-A", "--", "train", "tiny"], "--sbatch"),
        (["slurm", "lab.toml", "--gres", "a100", "--", "train", "tiny"], "--gres a100"),
        (
            ["slurm", "lab.toml", "--", "train", "tiny", "--data.path", "lab.toml"],
            "lab.toml has the suffix",
        ),
        (["slurm", "h100.toml", "--", "train", "tiny"], "H100-80GB-HBM3"),
        (
            ["slurm", "lab.toml", "--script", "lab.toml/x", "--", "train", "tiny"],
            "lab.toml",
        ),
        (["slurm", "lab.toml", "--", "train", "tiny", "--run-dir", "a\nb"], "a\\nb"),
        (["ssh", "none.toml", "--", "train", "tiny"], "none.toml"),
        (["ssh", "lab.toml", "--", "train", "tiny"], "lab.toml"),
        (["ssh", "--", "train", "tiny"], "launch ssh"),
        (["ssh", "lab.toml", "--", "train", "tiny", "--hosts", "x"], "--hosts"),
    ],
)
def test_bad_input_is_told_and_nothing_is_submitted(
    words: list[str],
    told: str,
    programs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    text = 'name = "h"\n[[node]]\nname = "h"\ndevice = "H100-80GB-HBM3"\ncount = 8\n'
    (tmp_path / "h100.toml").write_text(text)
    (programs / "sbatch").write_text("#!/bin/sh\ntouch submitted\n")
    assert launch(*words) == 2
    error = capsys.readouterr().err
    got = error.partition("allowed:")[0]
    assert told in got and "fix:" in error
    assert not (tmp_path / "submitted").exists()


def test_without_slurm_a_script_can_be_written_but_not_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab.toml").write_text(CLUSTER)
    monkeypatch.setenv("PATH", "/nowhere")
    given = ["--gres", "A100-SXM4-40GB=big", "--gres", "T4=small"]
    run = ["--", "train", "tiny"]
    assert launch("slurm", "lab.toml", *given, "--dry-run", *run) == 0
    first, second, _ = components(capsys.readouterr().out)
    assert "--gres=gpu:big:2" in first and "--gres=gpu:small:2" in second
    assert launch("slurm", "lab.toml", *given, *run) == 2
    assert "no sbatch on this machine" in capsys.readouterr().err
    assert launch("slurm", "lab.toml", *run) == 2
    assert "--gres A100-SXM4-40GB=TYPE" in capsys.readouterr().err


def test_help_says_how_it_is_typed(capsys: pytest.CaptureFixture[str]):
    assert launch("ssh", "--help") == 0
    assert "HOSTS.toml -- train" in capsys.readouterr().out
    for words in (["--help"], ["slurm", "--help"]):
        with pytest.raises(SystemExit):
            launch(*words)
        assert "--notice-s" in capsys.readouterr().out
    assert launch() == 2


def test_devices_of_hosts_make_a_cluster_file_with_measured_links(
    programs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(on_machines, "_PROBE", far_cards.__name__)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    hosts = [f'[[host]]\nname = "h{i}"\naddress = "127.0.0.{i}"\n' for i in (2, 3)]
    (tmp_path / "hosts.toml").write_text("\n".join(hosts))
    words = ["devices", "--ssh", "hosts.toml", "--output", "new.toml"]
    assert main(words) == 0
    found = load_cluster("new.toml")
    assert [(n.name, n.device) for n in found.nodes] == [("h2", "L4"), ("t4-0", "T4")]
    out = capsys.readouterr().out
    assert "h2 to h3: " in out and "Gbit/s" in out and "not measured" not in out
    (programs / "ssh.down").write_text("127.0.0.3\n")
    with pytest.warns(UserWarning, match="host h3 is left out"):
        assert main(words) == 1
    assert "\nnot in the cluster file: h3\n" in capsys.readouterr().out
    assert main(["devices", "--output", "x"]) == 2
    assert main(["devices", "--ssh", "none.toml"]) == 2
