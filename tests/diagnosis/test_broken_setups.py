# SPDX-License-Identifier: Apache-2.0
"""Broken set-ups: each is reported with its cause, and none blocks a check.

What can be broken is broken: packages, variables, files, ports, connections. Cards and
drivers are a folder of device files and a fake nvidia-smi.
"""

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from hetjax.cli.doctor import main
from hetjax.diagnosis import gathering, peers
from hetjax.diagnosis.checks import diagnosis
from hetjax.diagnosis.gathering import Scope, gather, start_devices
from hetjax.report.diagnosis import Finding
from tests.checkpoint.fake_s3 import FakeS3


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not start JAX; a separate test does that."""
    told = gathering.MARK + json.dumps(
        {"devices": [{"name": "cpu", "platform": "cpu", "count": 1}]}
    )
    command = (sys.executable, "-S", "-c", f"print({told!r})")
    monkeypatch.setattr(gathering.start_devices, "__defaults__", (command, 30.0))


def problems(asked: Scope) -> list[Finding]:
    findings = diagnosis(gather(asked)).findings
    return [finding for finding in findings if finding.level == "problem"]


def only(asked: Scope) -> Finding:
    (found,) = problems(asked)
    assert found.fix
    return found


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with an NVIDIA card."""
    (tmp_path / "machine" / "dev").mkdir(parents=True)
    (tmp_path / "machine" / "dev" / "nvidia0").touch()
    return tmp_path / "machine"


@pytest.fixture
def install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], None]:
    """A function that installs a package of that version, or a fake of it."""
    packages = tmp_path / "packages"
    packages.mkdir()
    monkeypatch.syspath_prepend(packages)

    def write(name: str, version: str) -> None:
        folder = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text)

    return write


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that installs a driver which reports such a card."""

    def write(told: str) -> None:
        smi = tmp_path / "bin" / "nvidia-smi"
        smi.parent.mkdir()
        smi.write_text(f"#!/bin/sh\necho '{told}'\n")
        smi.chmod(0o755)
        path = os.pathsep.join([str(smi.parent), os.environ["PATH"]])
        monkeypatch.setenv("PATH", path)

    return write


def jaxlib() -> str:
    return gathering.installed().versions["jaxlib"]


def test_a_plugin_of_another_version_than_jax(install):
    install("jax-cuda12-plugin", "0.7.2")
    found = only(Scope())
    assert found.found == f"JAX ignores jax-cuda12-plugin 0.7.2: jaxlib is {jaxlib()}"
    assert found.fix.startswith("pip install 'hetjax[cuda12]'")


def test_the_cpu_of_a_machine_with_a_card(
    machine: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    found = only(Scope(root=machine))
    assert "JAX cannot use it without jax-cuda12-plugin" in found.found
    assert found.fix.startswith("pip install 'hetjax[cuda12]'")


def test_a_card_that_a_variable_hides(
    machine: Path, install, monkeypatch: pytest.MonkeyPatch
):
    install("jax-cuda12-plugin", jaxlib())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = only(Scope(root=machine))
    assert "CUDA_VISIBLE_DEVICES is set to ''" in found.found
    assert found.fix.startswith("unset CUDA_VISIBLE_DEVICES")


def test_a_driver_too_old_for_the_wheels(install, driver):
    install("jax-cuda13-plugin", jaxlib())
    driver("GPU-1, NVIDIA GeForce RTX 3090, 24576, [N/A], 8.6, 535.183.01")
    found = only(Scope())
    assert "driver 580 or newer; this machine has 535.183.01" in found.found
    assert "pip install 'hetjax[cuda12]'" in found.fix


def test_a_card_too_old_for_cudnn(install, driver):
    install("jax-cuda12-plugin", jaxlib())
    install("nvidia-cudnn-cu12", "9.28.0.42")
    driver("GPU-1, Tesla V100-SXM2-16GB, 16384, [N/A], 7.0, 535.183.01")
    found = only(Scope())
    assert "nvidia-cudnn-cu12 9.28.0.42 has no code for Tesla V100" in found.found
    assert found.fix == "pip install 'hetjax[cuda12-volta]'"


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as taken:
        number = taken.getsockname()[1]
        found = only(Scope(ports=(number,)))
        assert f"cannot listen on port {number}: " in found.found
        assert f"sport = :{number}" in found.fix
    assert not problems(Scope(ports=(number,)))


@pytest.fixture
def peer() -> Iterator[Callable[..., str]]:
    """Another machine with its own clock: a function that returns its address."""
    opened: list[tuple[socket.socket, threading.Thread]] = []

    def start(clock: Callable[[], float] = time.time) -> str:
        listening = peers.listen(0)
        work = threading.Thread(
            target=peers.answer, args=(listening, 60.0, clock), daemon=True
        )
        work.start()
        opened.append((listening, work))
        return f"127.0.0.1:{listening.getsockname()[1]}"

    yield start
    for listening, work in opened:
        listening.close()
        work.join(5)


def test_a_clock_that_is_off(peer):
    address = peer(lambda: time.time() - 3600)
    found = only(Scope(peers=(address,)))
    assert found.check == "clocks"
    assert f"the clock of {address} is 36" in found.found and "behind" in found.found
    assert "timedatectl" in found.fix


def test_a_machine_that_answers_is_measured(peer):
    address = peer()
    facts = gather(Scope(peers=(address,)))
    (found,) = facts.peers
    assert found.error is None and found.gbit_per_s > 0 and found.latency_ms > 0
    assert abs(found.clock_ahead_s) < 1.0


def test_a_machine_that_cannot_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    found = only(Scope(peers=(address,)))
    assert f"{address} cannot be reached: Connection refused" in found.found
    assert f"hetjax doctor --listen {address.partition(':')[2]}" in found.fix


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (b"", "no answer in time"),
        (b"SSH-2.0-something\r\n", "something other than hetjax answers"),
    ],
)
def test_a_port_where_something_else_answers_is_not_waited_for(
    says: bytes, why: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(peers, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:

        def speak() -> None:
            connected, _ = other.accept()
            connected.sendall(says)
            time.sleep(0.5)
            connected.close()

        work = threading.Thread(target=speak)
        work.start()
        found = only(Scope(peers=(f"127.0.0.1:{other.getsockname()[1]}",)))
        work.join()
    assert found.found.endswith(f"cannot be reached: {why}")


def test_a_run_directory_that_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_, **__) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "run"))

    monkeypatch.setattr(Path, "mkdir", refuse)  # chmod would not stop root
    found = only(Scope(run_dir=tmp_path / "run"))
    assert "cannot be used" in found.found and "Permission denied" in found.found
    assert "--run-dir" in found.fix


def test_a_run_directory_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        found = only(Scope(run_dir=disk / "run"))
    else:
        try:
            found = only(Scope(run_dir=disk / "run"))
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)
    assert "No space left on device" in found.found
    assert found.fix.startswith("make room on its disk")


def test_a_run_directory_that_another_run_holds(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    with FileLock(run / ".lock"):
        (run / ".lock").write_text("4242\n")
        found = only(Scope(run_dir=run))
    assert "is in use by process 4242" in found.found
    assert "kill 4242" in found.fix
    assert not problems(Scope(run_dir=run))


def test_a_run_directory_that_is_not_there_yet_leaves_nothing_behind(tmp_path: Path):
    facts = gather(Scope(run_dir=tmp_path / "runs" / "new"))
    assert facts.run_dir and facts.run_dir.error is None
    assert facts.run_dir.write_mb_per_s > 0 and facts.run_dir.free_gib > 0
    assert not list(tmp_path.rglob("*new*"))
    assert not list(tmp_path.rglob(".hetjax-doctor-*"))


def test_a_run_directory_whose_file_server_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    over = threading.Event()
    monkeypatch.setattr(gathering, "_DISK_S", 0.2)
    monkeypatch.setattr(gathering, "run_directory", lambda path: over.wait(30))
    found = only(Scope(run_dir=tmp_path))
    over.set()
    assert "does not answer in 0.2 s" in found.found
    assert "file server" in found.fix


def test_a_store_without_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    found = only(Scope(cloud="gs://bucket/run"))
    assert "no Google Cloud credentials" in found.found
    assert "gcloud auth application-default login" in found.fix


@pytest.mark.parametrize("kind", ["gcs", "s3"])
def test_a_store_that_is_well_is_left_as_it_was(
    kind: str, request: pytest.FixtureRequest
):
    server = request.getfixturevalue(kind)
    url = f"{server.scheme}://bucket/run"
    endpoint = server.url if kind == "s3" else None
    asked = Scope(cloud=url, endpoint=endpoint)
    assert problems(asked) == []
    (found,) = [f for f in diagnosis(gather(asked)).findings if f.check == "store"]
    assert f"{url}: lists, creates once, reads and deletes" in found.found
    assert list(server.buckets["bucket"]) == ["run/.writable"]


@pytest.mark.parametrize(
    ("method", "fix"),
    [("HEAD", "s3:GetObject"), ("DELETE", "s3:DeleteObject"), ("PUT", "s3:PutObject")],
)
def test_a_store_that_does_not_allow_all(s3: FakeS3, method: str, fix: str):
    s3.fault = lambda got, *_: 403 if got == method else None
    found = only(Scope(cloud="s3://bucket/run", endpoint=s3.url))
    assert "refuses" in found.found and fix in found.fix


def test_a_store_that_overwrites(s3: FakeS3):
    s3.is_old = True
    found = only(Scope(cloud="s3://bucket/run", endpoint=s3.url))
    assert "ignores If-None-Match" in found.found and "another store" in found.fix


@pytest.mark.parametrize(
    ("ahead_s", "said"),
    [(300.0, "s ahead of this machine"), (3600.0, "RequestTimeTooSkewed")],
)
def test_a_store_with_another_time(s3: FakeS3, ahead_s: float, said: str):
    s3.ahead_s = ahead_s
    found = only(Scope(cloud="s3://bucket/run", endpoint=s3.url))
    assert said in found.found and "timedatectl set-ntp true" in found.fix


def test_a_store_that_never_answers(monkeypatch: pytest.MonkeyPatch):
    over = threading.Event()
    monkeypatch.setattr(gathering, "_STORE_S", 0.2)
    monkeypatch.setattr(gathering, "open_store", lambda url, **_: over.wait(30))
    assert "does not answer in 0.2 s" in only(Scope(cloud="gs://b/r")).found
    over.set()


def test_a_cluster_file_with_a_device_that_nobody_knows(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "x"\n[[node]]\nname = "n"\ndevice = "RTX-9999"\ncount = 1\n'
    )
    found = only(Scope(cluster=path))
    assert "'RTX-9999' is not in the device catalogue" in found.found
    assert "hetjax doctor --probe" in found.fix


@pytest.mark.parametrize(
    ("program", "limit_s", "said"),
    [
        ("import time; time.sleep(60)", 0.3, "no answer in 0.3 s"),
        ("raise SystemExit('libcuda.so: no such luck')", 30.0, "no such luck"),
        ("import os; os.abort()", 30.0, "exit code -6"),
    ],
)
def test_a_jax_that_does_not_start_is_told_of(program: str, limit_s: float, said: str):
    found = start_devices((sys.executable, "-S", "-c", program), limit_s)
    assert found.error is not None and said in found.error


def test_jax_tells_what_it_starts_with(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")
    command = (sys.executable, "-m", "hetjax.diagnosis.devices")
    (seen,) = start_devices(command, 120.0).devices
    assert (seen.name, seen.platform, seen.count) == ("cpu", "cpu", 3)


def test_the_command_says_by_its_exit_code_whether_there_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["--run-dir", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == 0
    (tmp_path / "file").touch()
    assert main(["--run-dir", str(tmp_path / "file")]) == 1
    told = capsys.readouterr().out
    assert "is a file" in told and "1 problem found" in told
