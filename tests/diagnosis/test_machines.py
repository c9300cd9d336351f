# SPDX-License-Identifier: Apache-2.0
"""A launcher's machines: each problem of one machine, or between two, is named."""

import socket
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from hetjax.api.doctor import diagnose
from hetjax.cluster.cluster import Cluster, Node
from hetjax.diagnosis import machines
from hetjax.diagnosis.facts import Machines, OtherMachine, Peer
from hetjax.diagnosis.machine_checks import findings_of_machines
from hetjax.diagnosis.machines import look_at_machines
from hetjax.diagnosis.on_machine import memory_gib, read_machine, writes_beside
from hetjax.errors import BadInput
from hetjax.files.parsing import Malformed
from hetjax.launchers import on_machines
from hetjax.launchers.over_ssh import SshHosts
from hetjax.launchers.slurm.on_slurm import SlurmJob
from hetjax.report.diagnosis import Finding
from tests.launchers import fake_programs, far_cards

VERSIONS = {"hetjax": "0.1.0", "jax": "0.12.0", "jaxlib": "0.12.0", "Python": "3.12"}
WAY = Peer(address="10.0.0.1:7431", latency_ms=0.1, gbit_per_s=9.4)
DESK = OtherMachine(name="desk", way=WAY, versions=VERSIONS, memory_gib=16.0)

LINE = (
    '{"findings": %s, "versions": %s, "memory_gib": %s, "cards": 0, '
    '"sees_run_dir": true, "writes_run_dir": %s}'
)


def bad(*there: OtherMachine, absent: Sequence[tuple[str, str]] = ()) -> list[Finding]:
    found = Machines(versions=VERSIONS, machines=there, absent=tuple(absent))
    return [f for f in findings_of_machines(found) if f.level != "ok"]


def test_machines_that_are_alike_and_reach_this_one_are_well():
    assert bad(DESK, replace(DESK, name="box")) == []


@pytest.mark.parametrize(
    ("changes", "level", "found", "fix"),
    [
        (
            {"versions": VERSIONS | {"jax": "0.10.2"}},
            "problem",
            "desk: jax 0.10.2, on this machine 0.12.0",
            "pip install 'jax==0.12.0'",
        ),
        (
            {"versions": {k: v for k, v in VERSIONS.items() if k != "hetjax"}},
            "problem",
            "desk: hetjax missing",
            "install hetjax 0.1.0 there",
        ),
        ({"versions": VERSIONS | {"Python": "3.11"}}, "warning", "Python 3.11", "3.12"),
        ({"memory_gib": 1.9}, "warning", "desk: 1.9 GiB", "--mem"),
        (
            {"way": replace(WAY, error="no answer in time")},
            "problem",
            "desk: cannot reach this machine at 10.0.0.1:7431: no answer",
            "firewalls",
        ),
        (
            {"way": replace(WAY, clock_ahead_s=90.0)},
            "problem",
            "desk: the clock is 90.0 s behind this machine's",
            "set-ntp",
        ),
        ({"sees_run_dir": False}, "warning", "desk: cannot see the run dir", "share"),
        ({"writes_run_dir": False}, "problem", "desk: sees the run", "read-only"),
        (
            {"granted": (("T4", 1), ("A100-SXM4-40GB", 2)), "cards": 2},
            "problem",
            "desk: this job has 1 x T4 and 2 x A100-SXM4-40GB there, JAX finds 2",
            "nvidia-smi",
        ),
        ({"error": "No module named 'hetjax'"}, "problem", "No module", "install"),
        (
            {"error": "slurmstepd-a: Detected 1 oom-kill event(s)"},
            "problem",
            "desk: no report: slurmstepd-a",
            "4 GiB or more, with Slurm's --mem",
        ),
        (
            {"findings": (Finding(check="x", level="problem", found="y", fix="z"),)},
            "problem",
            "desk: y",
            "z",
        ),
    ],
)
def test_what_is_wrong_is_named_with_the_machine(changes, level, found, fix):
    [finding] = bad(replace(DESK, **changes))
    assert finding.level == level
    assert found in finding.found and "desk" in finding.found
    assert fix in finding.fix


def test_machines_with_the_same_finding_share_a_row():
    old = [
        replace(DESK, name=f"node{i}", versions=VERSIONS | {"jax": "0.10.2"})
        for i in range(12)
    ]
    first, second = bad(*old, replace(DESK, name="small", memory_gib=1.0))
    assert first.found.startswith("node0, node1, ")
    assert first.found.endswith("node7 and 4 more: jax 0.10.2, on this machine 0.12.0")
    assert second.found.startswith("small: 1.0 GiB of memory")


def test_a_machine_that_cannot_be_reached_comes_first():
    first, _ = bad(replace(DESK, memory_gib=1.0), absent=[("host box is off", "do")])
    assert (first.level, first.found, first.fix) == ("problem", "host box is off", "do")


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"findings": []}',
        LINE % ("[]", '{"jax": 1}', "1", "true"),
        LINE % ("[]", "{}", "1", "1"),
        LINE % ("[3]", "{}", "1", "true"),
        LINE % ("[]", "{}", "NaN", "true"),
        "[" * 100,
    ],
)
def test_a_line_that_is_not_ours_is_refused(line: str):
    with pytest.raises((BadInput, Malformed)):
        read_machine("desk", f"hetjax machine: {line}", WAY)
    assert read_machine("desk", line, WAY) is None


def test_a_line_of_ours_is_read():
    line = "hetjax machine: " + LINE % ("[]", '{"jax": "1"}', "1.5", "false")
    read = read_machine("desk", line, WAY)
    assert read is not None
    assert (read.memory_gib, read.sees_run_dir, read.writes_run_dir) == (1.5, 1, 0)


def test_a_folder_that_takes_no_file_is_not_one_to_keep_a_run_in(tmp_path: Path):
    """Root may write everywhere but to file systems that make no files."""
    assert writes_beside(str(tmp_path / "file")) and not [*tmp_path.iterdir()]
    assert not writes_beside("/proc/version")


def test_memory_is_the_least_limit_of_the_groups_above(tmp_path: Path):
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert memory_gib(tmp_path) == 0.0
    write("proc/meminfo", "MemTotal: 16777216 kB\nMemFree: 1 kB\n")
    write("proc/self/cgroup", "0::/job_1/step_0\n")
    assert memory_gib(tmp_path) == 16.0
    write("sys/fs/cgroup/job_1/step_0/memory.max", "max\n")
    write("sys/fs/cgroup/job_1/memory.max", str(3 << 30))
    assert memory_gib(tmp_path) == 3.0
    write("sys/fs/cgroup/other/memory.max", "1")
    write("memory.max", "1")
    assert memory_gib(tmp_path) == 3.0
    write("proc/self/cgroup", "9:cpu,cpuacct:/job_2\n4:memory:/slurm/job_2\n0::/x\n")
    write("sys/fs/cgroup/memory/slurm/memory.limit_in_bytes", str(2 << 30))
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", str(2**63 - 4096))
    assert memory_gib(tmp_path) == 2.0


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    return fake_programs.put_on_path(tmp_path, monkeypatch)


def test_hosts_are_looked_at_and_one_that_is_off_is_a_problem(
    programs: Path, tmp_path: Path
):
    (programs / "ssh.down").write_text("127.0.0.3\n")
    file = tmp_path / "hosts.toml"
    file.write_text(
        '[[host]]\nname = "desk"\naddress = "127.0.0.2"\n'
        '[[host]]\nname = "box"\naddress = "127.0.0.3"\n'
    )
    found = diagnose(ssh=file, run_dir=tmp_path / "run")
    (problem,) = (f for f in found.findings if f.level == "problem")
    assert problem.found.startswith("host box is left out: ")
    assert "BatchMode" in problem.fix and "[[host]]" not in problem.fix
    desk = {f.check for f in found.findings if f.found.startswith("desk: ")}
    assert desk == {"versions", "devices", "memory", "links"}
    assert not [*tmp_path.glob(".hetjax-doctor-*")]
    (programs / "ssh.down").write_text("127.0.0.2\n127.0.0.3\n")
    *_, last = diagnose(ssh=file).findings
    assert last.level == "problem" and "no host that answers" in last.found


def test_a_job_is_looked_at_and_one_that_sees_another_disk_is_told(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What a node prints is faked: each node has a disk and versions."""
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setattr(machines, "_MODULE", "tests.diagnosis.telling_machine")
    monkeypatch.setattr(on_machines, "_PROBE", far_cards.__name__)
    kinds = {"tesla": "T4", "big": "H100-80GB-HBM3"}
    nodes = [Node(name=name, device=kind, count=1) for name, kind in kinds.items()]
    file = Cluster(name="file", nodes=tuple(nodes))
    looked = look_at_machines(SlurmJob(), tmp_path / "run", file)
    found = findings_of_machines(looked)
    bad = [(f.level, f.found) for f in found if f.level != "ok"]
    (big, fast) = (f.found for f in found if f.check in ("machines", "devices"))
    assert big.startswith("node 'big' wants 1 x H100-80GB-HBM3; there are ")
    assert fast == "fast: this job has 2 x A100-SXM4-40GB there, JAX finds 1"
    assert bad[:3] == [
        ("problem", big),
        ("problem", fast),
        ("problem", "old: jax 0.1, on this machine " + version("jax")),
    ]
    [(level, text)] = bad[3:]
    assert level == "warning"
    assert text.startswith("old: cannot see the run directory")


def test_a_machine_that_cannot_reach_this_one(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with socket.socket() as taken:  # bound, without a listener
        taken.bind(("127.0.0.1", 0))
        file = tmp_path / "hosts.toml"
        file.write_text(
            'controller = "127.0.0.9"\n[[host]]\nname = "a"\naddress = "127.0.0.2"\n'
        )
        monkeypatch.setattr(machines, "_MODULE", "tests.diagnosis.telling_machine")
        port = taken.getsockname()[1]
        monkeypatch.setattr(machines, "_answering", lambda: nullcontext(port))
        found = findings_of_machines(look_at_machines(SshHosts(file), None))
    (problem,) = (f for f in found if f.level == "problem")
    assert problem.found == (
        f"a: cannot reach this machine at 127.0.0.9:{port}: Connection refused"
    )
