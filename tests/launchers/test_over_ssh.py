# SPDX-License-Identifier: Apache-2.0
"""The launcher `ssh` on hosts of this machine: its cluster, quoting and errors."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.errors import BadInput
from hetjax.launchers import on_machines
from hetjax.launchers.launcher import LaunchRequest
from hetjax.launchers.on_machines import OnMachines
from hetjax.launchers.over_ssh import SshHosts, find_cluster, run_on_nodes
from tests.launchers import fake_programs, far_cards
from tests.launchers.fake_programs import heard

ODD = 'it\'s "$HOME" `id` a;b\n* \\'  # no shell may interpret any of it


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(on_machines, "_PROBE", far_cards.__name__)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    return fake_programs.put_on_path(tmp_path, monkeypatch)


def hosts(folder: Path, **more: str) -> Path:
    file = folder / "hosts.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in more.items()]
    text = [
        f'[[host]]\nname = "{name}"\naddress = "127.0.0.{i}"\n' + "\n".join(lines)
        for i, name in enumerate(("left", "right"), start=2)
    ]
    file.write_text("\n".join(text))
    return file


def test_the_cluster_is_that_of_the_hosts_and_one_that_is_off_is_left_out(
    programs: Path, tmp_path: Path
):
    file = hosts(tmp_path)
    assert [(n.name, n.device) for n in find_cluster(file).nodes] == [
        ("left", "L4"),  # a node of CPUs only if there is nothing else
        ("t4-0", "T4"),
    ]
    (programs / "ssh.down").write_text("127.0.0.2\n")
    with pytest.warns(UserWarning, match="host left is left out: .*refused"):
        assert [(n.name, n.device) for n in find_cluster(file).nodes] == [
            ("right", "cpu")
        ]
    lacking = Cluster(name="c", nodes=(Node(name="left", device="L4", count=1),))
    with pytest.warns(UserWarning, match="left out"), pytest.raises(BadInput) as told:
        run_on_nodes(lacking, file)
    assert "node 'left' wants 1 x L4" in told.value.got
    (programs / "ssh.down").write_text("127.0.0.2\n127.0.0.3\n")
    with pytest.warns(UserWarning), pytest.raises(BadInput) as told:
        find_cluster(file)
    assert told.value.got.count("Connection refused") == 2
    assert told.value.fix.endswith("-- 127.0.0.2 true")


def test_a_simulated_node_waits_for_the_host_of_its_name_and_returns_to_it(
    programs: Path, tmp_path: Path
):
    """`other` is named after no host, so any host will do for it."""
    names = ("left", "right", "other")
    nodes = tuple(Node(name=name, device="L4", count=1) for name in names)
    cluster = Cluster(name="c", nodes=nodes)
    request = LaunchRequest(
        cluster=cluster,
        simulate=True,
        logs=tmp_path,
        cache_dir=tmp_path,
        work=lambda settings: pytest.fail("nobody asked for a step"),
    )
    with ExitStack() as stack:
        launcher = OnMachines(request, SshHosts(hosts(tmp_path)), stack)

        def there() -> set[str]:
            found = launcher.present(cluster, True)
            assert found is not None
            return {node.name for node in found.nodes}

        assert there() == {"left", "right", "other"}
        (programs / "ssh.down").write_text("127.0.0.3\n")
        for _ in range(2):  # also at a later look
            with pytest.warns(UserWarning, match="host right is left out"):
                assert there() == {"left", "other"}
        (programs / "ssh.down").unlink()
        assert there() == {"left", "right", "other"}


def test_every_word_arrives_as_it_was_whatever_is_in_it(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    odd = tmp_path / "a $(touch folder) 'of' its own"
    odd.mkdir()
    python = odd / "python"
    python.symlink_to(sys.executable)
    monkeypatch.setenv("XLA_ODD", ODD)
    monkeypatch.setenv("OTHER", "stays here")
    file = hosts(tmp_path, directory=str(odd), python=str(python), user="me")
    cluster = Cluster(name="c", nodes=(Node(name="right", device="cpu", count=1),))
    run = run_on_nodes(cluster, file)
    done = run(cluster.node("right"), "tests.launchers.telling_variables", ODD, 60.0)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["XLA_ODD"] == ODD
    assert "OTHER" not in told and told["SSH_CONNECTION"].endswith("127.0.0.3 22")
    assert not (odd / "folder").exists()


def test_nothing_of_what_ssh_checks_is_weakened_and_nobody_is_asked(
    programs: Path, tmp_path: Path
):
    find_cluster(hosts(tmp_path, user="me"))
    options = heard(programs, "ssh")
    assert {"BatchMode=yes", "-a", "-x", "-l", "me"} <= {*options}
    assert not [o for o in options if "HostKey" in o or "KnownHosts" in o]


def test_the_end_of_a_client_is_not_the_end_of_what_it_started(
    programs: Path, tmp_path: Path
):
    reach = SshHosts(hosts(tmp_path))
    machine = reach.machines(looks=False)[0]
    place = reach.place(machine, {"MARK": str(tmp_path)})
    assert place.address == "127.0.0.2"
    client = subprocess.Popen(
        [*place.prefix, place.python, "-c", "'import sys; sys.stdin.read()'"],
        stdin=subprocess.PIPE,
    )
    assert client.stdin is not None
    while not (far := fake_programs.processes(["-c"], f"MARK={tmp_path}\0")):
        assert client.poll() is None
    client.kill()
    client.wait()
    assert fake_programs.processes(["-c"], f"MARK={tmp_path}\0") == far
    client.stdin.close()
    while fake_programs.processes(["-c"], f"MARK={tmp_path}\0"):
        pass


def test_without_ssh_or_with_a_bad_file_nothing_is_started(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = hosts(tmp_path, uesr="me")
    with pytest.raises(BadInput, match=r"host\[0\].uesr"):
        find_cluster(file)
    assert not heard(programs, "ssh")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BadInput, match="no ssh on this machine"):
        find_cluster(hosts(tmp_path))
