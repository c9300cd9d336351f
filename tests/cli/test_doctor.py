# SPDX-License-Identifier: Apache-2.0
"""`doctor`: nodes for a cluster file, and both ends of a route between machines."""

import subprocess
import sys
from functools import partial

import pytest

from hetjax.cli.doctor import main
from hetjax.cluster.catalogue import device_spec
from hetjax.cluster.cluster_files import parse_cluster
from hetjax.diagnosis import peers
from hetjax.profiling import found_here, probe
from hetjax.profiling.probe import ProbeSizes


def test_the_probe_prints_a_cluster_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    sizes = ProbeSizes(product=(32,), copy_bytes=1 << 16, message_bytes=1 << 16)
    monkeypatch.setattr(probe, "_SAMPLE_S", 1e-3)
    quick = partial(probe.probe, sizes=sizes)
    monkeypatch.setattr(found_here.measured_here, "__defaults__", (quick,))
    assert main(["--probe"]) == 0
    (node,) = parse_cluster(capsys.readouterr().out).nodes
    assert (node.device, node.count) == ("cpu", 16)
    assert device_spec(node).sources["peak_tflops"] == "the cluster file"


def test_one_listens_and_the_other_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with peers.listen(0) as free:
        port = free.getsockname()[1]
    asking = f"from hetjax.diagnosis.peers import ask; print(ask('127.0.0.1:{port}'))"
    monkeypatch.setattr(peers, "LISTEN_S", 60.0)
    once = partial(peers.answer, limit_s=60.0)

    def answered(listening) -> int:
        words = [sys.executable, "-c", asking]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
            import threading

            work = threading.Thread(target=once, args=(listening,))
            work.start()
            told, _ = child.communicate(timeout=60)
            listening.close()
            work.join()
        assert "error=None" in told
        return 1

    monkeypatch.setattr(peers, "answer", answered)
    assert main(["--listen", str(port)]) == 0
    told = capsys.readouterr().out
    assert f"hetjax doctor --peers HOST:{port}" in told and "answered 1 times" in told


def test_a_port_that_is_taken_is_bad_input(capsys: pytest.CaptureFixture[str]):
    with peers.listen(0) as taken:
        port = taken.getsockname()[1]
        assert main(["--listen", str(port)]) == 2
    assert f"got: --listen {port}: " in capsys.readouterr().err
