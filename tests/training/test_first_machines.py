# SPDX-License-Identifier: Apache-2.0
"""A run that begins without any machine: its command starts all of them."""

import os
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from hetjax.launchers import by_joining, reprovisioning
from hetjax.train import main
from tests.training.pair import STEPS, after_steps, trained, training, wait_until
from tests.training.small import events
from tests.training.test_workers import set_environment

# Starts a machine for each missing node, by the command that the run has written for
# it, and ends after the first step, as the commands of clouds may.
ASK = """
import json, os, pathlib, shlex, subprocess, sys, time
asked = json.load(sys.stdin)
names = [node["name"] for node in asked["missing"]]
commands = pathlib.Path(asked["run_dir"], "join", "commands.txt").read_text()
for line in commands.splitlines():
    _, *words, _, token = shlex.split(line)
    if words[words.index("--node") + 1] in names:
        machine = subprocess.Popen(
            [sys.executable, "-m", "hetjax", *words, "--address", "127.0.0.1"],
            stdin=open(token), stdout=subprocess.DEVNULL, start_new_session=True,
        )
        with open(sys.argv[1], "a") as pids:
            print(machine.pid, file=pids)
print("started", *names, flush=True)
metrics = pathlib.Path(asked["run_dir"], "metrics.jsonl")
while not metrics.exists() or not metrics.read_text():
    time.sleep(0.05)
"""


def test_the_first_machines_are_asked_for_while_the_run_waits_for_them(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    set_environment(monkeypatch)
    monkeypatch.setattr(by_joining, "_ASKS_AFTER_S", 0.0)
    monkeypatch.setattr(reprovisioning, "_LOOK_S", 0.05)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    script, pids, run_dir = tmp_path / "ask.py", tmp_path / "pids", tmp_path / "run"
    script.write_text(ASK)

    def has_ended() -> bool:
        return bool(events(run_dir, "reprovisioned"))

    command = shlex.join([sys.executable, str(script), str(pids)])
    options = "--launcher join --join.address 127.0.0.1:0 --join.wait-s 60".split()
    after_steps(monkeypatch, lambda done: done < 2 or wait_until(has_ended))
    try:
        words = training(run_dir, cache, *options, "--reprovision", command)
        assert main(words) == 0
    finally:
        for pid in pids.read_text().split() if pids.exists() else ():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    assert trained(run_dir) == [*STEPS]
    (asked,) = events(run_dir, "reprovisioned")
    assert (asked["nodes"], asked["code"]) == (["left", "right"], 0)
    assert (run_dir / "logs/reprovision.log").read_text() == "started left right\n"
    log = (run_dir / "log.txt").read_text()
    assert log.count("--reprovision asked for left, right: exit code 0") == 1
