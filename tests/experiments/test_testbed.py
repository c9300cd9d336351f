# SPDX-License-Identifier: Apache-2.0
"""The testbed: unequal hosts that leave nothing behind. Does not test Ray itself."""

import fcntl
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.testbed import cpu_quota, hosts, network, processes
from experiments.testbed.__main__ import host_of
from experiments.testbed.hosts import Host, Testbed, obstacle
from experiments.testbed.measured import link_speed
from experiments.testbed.probe import loop
from experiments.testbed.ray_nodes import ray_nodes, start_words
from hetjax.errors import BadInput

FAST = Host(name="fast")
SLOW = Host(name="slow", cpu_percent=25.0, egress_mbit_per_s=40.0)
ROOT = Path(hosts.__file__).parents[2]
_PROBLEM = obstacle([SLOW])
needs_root = pytest.mark.skipif(
    _PROBLEM is not None, reason=f"no testbed here: {_PROBLEM and _PROBLEM.got}"
)
ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 7)) as server:
    print("ready", flush=True)
    while True:
        with server.accept()[0] as connection:
            connection.sendall(connection.recv(8))
"""
IMMUNE = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); "


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Run one test at a time over all processes, as each checks what is left behind.

    SIGINT raises again, which it does not in a background process.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with (Path(tempfile.gettempdir()) / "hetjax-testbed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    signal.signal(signal.SIGINT, before)


def _traces() -> set[str]:
    """Return all that a testbed makes: namespaces, network interfaces, CPU groups."""
    controller = cpu_quota.find_controller()
    assert controller is not None
    return {
        *network.namespaces(),
        *os.listdir("/sys/class/net"),
        *(group.name for group in controller.mount.iterdir() if group.is_dir()),
    }


def _answers(address: str, timeout_s: float) -> bool:
    try:
        with socket.create_connection((address, 7), timeout=timeout_s) as connection:
            connection.sendall(b"hello")
            return connection.recv(8) == b"hello"
    except OSError:
        return False


def _start(words: list[str]) -> "subprocess.Popen[str]":
    """Start a process, and wait until it prints that it is ready."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


@contextmanager
def _leaves_nothing() -> Iterator[None]:
    for name in ("hetjax", "killed"):
        hosts.clear_abandoned(name)  # as a testbed does first, so that nothing is left
    before = _traces()
    yield
    assert _traces() == before


@needs_root
def test_what_was_started_outside_a_quota_can_be_put_under_it():
    with _leaves_nothing(), Testbed([FAST, SLOW]) as testbed:
        sleep = ["sh", "-c", "echo; exec sleep 60"]
        process = _start([*testbed.network_prefix(SLOW.name), *sleep])
        group = testbed.cpu_group(SLOW.name)
        assert group is not None and group.read_text().split() == []
        testbed.hold_quotas()
        assert group.read_text().split() == [str(process.pid)]


@needs_root
@pytest.mark.parametrize("seen", [True, False])
def test_all_is_gone_and_all_processes_are_ended_after_the_block(
    seen: bool, monkeypatch: pytest.MonkeyPatch
):
    if not seen:  # like processes that enter their host while others are killed
        monkeypatch.setattr(Testbed, "_members", lambda testbed: set())
    sleep = ["sh", "-c", "echo; exec sleep 60"]
    with _leaves_nothing():
        with Testbed([FAST, SLOW]) as testbed:
            sleeping = [_start([*testbed.prefix(h.name), *sleep]) for h in (FAST, SLOW)]
    assert [process.wait(5) for process in sleeping] == [-signal.SIGTERM] * 2


@needs_root
def test_a_process_that_comes_too_late_finds_no_host():
    with _leaves_nothing():
        with Testbed([FAST, SLOW]) as testbed:
            words = [[*testbed.prefix(h.name), "sleep", "60"] for h in (FAST, SLOW)]
    assert all(subprocess.run(command).returncode > 0 for command in words)


@needs_root
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_all_is_gone_after_an_exception(error: type[BaseException]):
    with _leaves_nothing(), pytest.raises(error), Testbed([SLOW]):
        raise error


@needs_root
def test_all_is_gone_when_building_fails_half_way(monkeypatch: pytest.MonkeyPatch):
    def fail(controller: object, name: str, cpu_percent: float) -> None:
        raise OSError("no more groups")

    monkeypatch.setattr(cpu_quota, "make_group", fail)
    with _leaves_nothing(), pytest.raises(OSError, match="no more groups"):
        with Testbed([FAST, SLOW]):
            raise AssertionError("was built")


@needs_root
def test_all_is_gone_after_sigterm_and_the_command_too():
    words = [sys.executable, "-m", "experiments.testbed", "--host", "slow:50:10"]
    command = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with _leaves_nothing():
        process = subprocess.Popen(
            [*words, "--", sys.executable, "-c", command],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM
        process.stdout.close()
    assert not processes.is_alive(pid)


@needs_root
def test_what_a_killed_testbed_left_is_removed_by_the_next():
    script = f"""
import os, subprocess
from experiments.testbed.hosts import Host, Testbed
with Testbed([{SLOW!r}], name="killed") as testbed:
    words = [*testbed.prefix("slow"), "sleep", "60"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    while process.pid not in testbed.members("slow"):
        pass
    print(process.pid, flush=True)
    os.kill(os.getpid(), 9)
"""
    with _leaves_nothing():
        words = [sys.executable, "-c", script]
        done = subprocess.run(words, stdout=subprocess.PIPE, cwd=ROOT)
        assert processes.is_alive(int(done.stdout))
        with pytest.warns(UserWarning, match="removing killed-"):
            with Testbed([FAST], name="killed"):
                assert not processes.is_alive(int(done.stdout))


@needs_root
def test_a_testbed_of_another_container_is_left_alone():
    script = f"""
from experiments.testbed.hosts import Host, Testbed
with Testbed([{FAST!r}]):
    pass
"""
    container = ["unshare", "--pid", "--fork", "--mount-proc"]
    with _leaves_nothing(), Testbed([FAST, SLOW]) as testbed:
        pid = _start([*testbed.prefix("slow"), "sh", "-c", "echo; exec sleep 60"]).pid
        before = _traces()
        subprocess.run([*container, sys.executable, "-c", script], check=True, cwd=ROOT)
        assert _traces() == before
        assert testbed.members("slow") == {pid}


@needs_root
def test_a_process_gets_its_quota_of_the_cpu():
    probe = Path(hosts.__file__).with_name("probe.py")
    loop = [sys.executable, "-I", str(probe), "loop", "2000000"]
    with Testbed([SLOW]) as testbed:
        words = [*testbed.prefix("slow"), *loop]
        shares = [(_cpu_share(words), _cpu_share(loop)) for _ in range(3)]
    limited, free = map(sorted, zip(*shares, strict=True))
    # on a shared machine, even a process without a quota gets less than all
    assert min(0.125, free[0] / 3) < limited[1] < 0.5


def _cpu_share(words: list[str]) -> float:
    times = json.loads(subprocess.check_output(words))
    return times["cpu_s"] / times["wall_s"]


@needs_root
def test_a_process_keeps_its_id_and_only_it_is_on_the_host():
    with Testbed([FAST, SLOW]) as testbed:
        words = [*testbed.prefix("slow"), "sh", "-c", "echo; exec sleep 60"]
        pid = _start(words).pid
        assert testbed.members("slow") == {pid}
        assert testbed.members("fast") == set()
        group = testbed.cpu_group("slow")
        assert group is not None and group.read_text().split() == [str(pid)]


@needs_root
def test_a_link_carries_its_rate_and_the_one_that_it_is_set_to():
    faster = Host(name="slow", egress_mbit_per_s=200.0)
    with Testbed([SLOW, FAST]) as testbed:
        shares = [link_speed(testbed, SLOW, "fast")["of_rate"]]
        testbed.set_link("slow", faster.egress_mbit_per_s)
        shares.append(link_speed(testbed, faster, "fast")["of_rate"])
        testbed.set_link("slow", None)
        assert link_speed(testbed, faster, "fast")["of_rate"] > 2.0
    assert all(0.5 < share < 1.05 for share in shares)


@needs_root
def test_a_cut_link_is_silent_until_it_is_mended():
    with Testbed([FAST, SLOW]) as testbed:
        address = testbed.address("slow")
        _start([*testbed.network_prefix("slow"), sys.executable, "-c", ECHO, address])
        assert _answers(address, 5.0)
        testbed.cut("slow")
        start_s = time.monotonic()
        assert not _answers(address, 0.3)
        assert time.monotonic() - start_s >= 0.3  # lost, not refused
        testbed.mend("slow")
        assert _answers(address, 5.0)


@needs_root
def test_two_testbeds_stand_at_once():
    with _leaves_nothing(), Testbed([FAST]) as one, Testbed([FAST]) as other:
        addresses = {
            *(one.address("fast"), one.controller_address),
            *(other.address("fast"), other.controller_address),
        }
        assert len(addresses) == 4


def test_a_process_that_ignores_sigterm_is_ended_too():
    process = _start([sys.executable, "-c", IMMUNE + "time.sleep(60)"])
    processes.end(lambda: {*filter(processes.is_alive, [process.pid])}, grace_s=0.1)
    assert process.wait(5) == -signal.SIGKILL


def test_signals_wait_until_a_block_that_must_not_be_disturbed_is_over():
    done = []
    with pytest.raises(KeyboardInterrupt), processes.undisturbed():
        signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert done == [True]


def test_without_root_the_message_says_so_and_offers_the_other_mode(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(BadInput) as caught, Testbed([FAST]):
        raise AssertionError("was built")
    assert caught.value.got == "user id 1000, not root"
    assert "--quota-less" in caught.value.fix


def test_a_quota_less_testbed_is_this_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with Testbed([FAST, SLOW], quota_less=True) as testbed:
        assert testbed.address("slow") == testbed.controller_address == "127.0.0.1"
        assert testbed.prefix("slow") == testbed.network_prefix("slow") == []
        with pytest.raises(BadInput, match="no link of its own"):
            testbed.cut("slow")
        with pytest.raises(BadInput, match="quota-less testbed"), ray_nodes(testbed):
            raise AssertionError("was started")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "0 hosts"),
        ([FAST, FAST], "2 hosts, 1 different names"),
        ([Host(name="a/b")], "the name 'a/b'"),
        ([Host(name="a", cpu_percent=0.0)], "host 'a' with cpu_percent 0"),
        ([Host(name="a", egress_mbit_per_s=-1.0)], "host 'a' with link rate -1"),
    ],
)
def test_hosts_that_cannot_be_are_refused(wrong: list[Host], message: str):
    with pytest.raises(BadInput, match=message):
        Testbed(wrong)


def test_hosts_are_read_from_words():
    assert host_of("a100:80:1000") == Host(
        name="a100", cpu_percent=80.0, egress_mbit_per_s=1000.0
    )
    assert host_of("a100::10") == Host(name="a100", egress_mbit_per_s=10.0)
    assert host_of("a100") == Host(name="a100")
    for wrong in ("a100:fast", "a100:80:1000:1"):
        with pytest.raises(BadInput, match=f"--host {wrong}"):
            host_of(wrong)


MOUNTS_1 = """\
24 1 0:22 / /sys rw shared:2 - sysfs sysfs rw
30 24 0:26 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset
31 24 0:27 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct
"""


def test_the_cpu_controller_is_found_in_both_versions(tmp_path: Path):
    assert cpu_quota.find_controller(MOUNTS_1) == cpu_quota.Controller(
        version=1, mount=Path("/sys/fs/cgroup/cpu,cpuacct")
    )
    mounts_2 = f"30 24 0:26 / {tmp_path} rw shared:4 - cgroup2 cgroup2 rw,nsdelegate"
    assert cpu_quota.find_controller(mounts_2) is None
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory\n")
    assert cpu_quota.find_controller(mounts_2) == cpu_quota.Controller(
        version=2, mount=tmp_path
    )


def test_limits_are_written_as_each_version_wants_them():
    assert cpu_quota.limits(1, 40.0) == {
        "cpu.cfs_period_us": "10000",
        "cpu.cfs_quota_us": "4000",
    }
    assert cpu_quota.limits(2, 250.0) == {"cpu.max": "25000 10000"}
    assert cpu_quota.limits(2, 5.0) == {"cpu.max": "1000 20000"}


def test_a_group_of_version_2_turns_the_controller_on_first(tmp_path: Path):
    controller = cpu_quota.Controller(version=2, mount=tmp_path)
    group = cpu_quota.make_group(controller, "slow", 20.0)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    assert (group / "cpu.max").read_text() == "2000 10000"


@given(st.floats(0.1, 1e4))
def test_limits_keep_the_share_and_what_the_kernel_allows(cpu_percent: float):
    quota_us, period_us = map(int, cpu_quota.limits(2, cpu_percent)["cpu.max"].split())
    assert quota_us >= 1000 and 10_000 <= period_us <= 1_000_000
    assert quota_us / period_us == pytest.approx(cpu_percent / 100, rel=1e-3)


@given(st.integers(0, 255), st.sets(st.integers(0, 255), max_size=250))
def test_a_subnet_that_is_in_use_is_never_chosen(first: int, used: set[int]):
    routes = [{"dst": f"10.77.{x}.0/24"} for x in used]
    routes += [{"dst": "default"}, {"dst": "10.0.0.0/8"}, {"dst": "192.0.2.7"}]
    subnet = network.free_subnet(first, json.dumps(routes))
    assert subnet.subnet_of(ipaddress.IPv4Network("10.77.0.0/16"))
    assert int(str(subnet).split(".")[2]) not in used


def test_a_bucket_holds_5_ms_of_a_fast_link_and_a_packet_of_a_slow_one():
    fast = "tbf rate 10000000000bit burst 6250000 latency 200ms"
    slow = "tbf rate 500000bit burst 80000 latency 200ms"
    assert network.bucket(10_000) == fast.split()
    assert network.bucket(0.5) == slow.split()


def test_a_node_of_ray_is_told_its_address_and_its_name():
    words = start_words(Host(name="v100", cpu_percent=120.0), "10.77.3.4")
    assert words[3:] == [
        "start",
        "--node-ip-address=10.77.3.4",
        "--num-cpus=2",
        "--num-gpus=0",
        '--resources={"hetjax_node_v100": 1}',
        "--object-store-memory=100000000",
        "--disable-usage-stats",
    ]


def test_the_busy_loop_is_busy():
    times = loop(200_000)
    assert 0.0 < times["cpu_s"] <= 1.5 * times["wall_s"]
