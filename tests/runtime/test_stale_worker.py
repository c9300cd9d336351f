# SPDX-License-Identifier: Apache-2.0
"""A worker process that a newer start has replaced ends itself and says why."""

import os
import secrets
import subprocess
import sys

from hetjax.runtime.rpc.worker_connections import (
    ControllerConnection,
    SocketConnections,
)
from hetjax.runtime.worker.bootstrap import WorkerBootstrap, read_bootstrap

SECRET = secrets.token_bytes(32)


def test_a_process_of_an_older_start_ends_when_it_comes_late():
    connections = SocketConnections("127.0.0.1:0", SECRET)
    heard: list[str] = []
    newer = ControllerConnection(
        connections.address, "a", SECRET, lambda *_: None, heard.append, 10.0, 2
    )
    connections.wait_for(["a"])
    stale = WorkerBootstrap(
        worker="a",
        controller=connections.address,
        listen="127.0.0.1:0",
        secret=SECRET,
        incarnation=1,
    )
    assert read_bootstrap(stale.text()) == stale
    ended = subprocess.run(
        [sys.executable, "-m", "hetjax.training.worker"],
        input=stale.text() + "\n",
        capture_output=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last == "worker a ends: a newer start of 'a' has taken its place"
    assert connections.workers == ["a"] and not heard
    newer.close()
    connections.close()
