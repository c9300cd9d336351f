# SPDX-License-Identifier: Apache-2.0
"""A command that requests machines: when it runs, its input, and its limits."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, Queue

import pytest

from hetjax.cluster.cluster import Node
from hetjax.errors import BadInput
from hetjax.launchers.reprovisioning import (
    CommandEnded,
    Limits,
    Reprovisioning,
    split_command,
)

SOON = Limits(command_s=20.0, first_pause_s=0.05, longest_pause_s=0.2)
SPOT = Node(name="spot-1", device="L4", count=8, hosts=2, zone="east", spot=True)
# writes its input into a new file of the folder of its first argument
NOTES = """
import json, os, sys, pathlib
folder = pathlib.Path(sys.argv[1])
told = {"words": sys.argv[2:], "read": sys.stdin.read(), "variables": dict(os.environ)}
(folder / f"{len([*folder.iterdir()])}.json").write_text(json.dumps(told))
print("asked")
"""


def script(folder: Path, text: str = NOTES) -> list[str]:
    path = folder / "ask.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def asking(
    command: Sequence[str],
    missing: Callable[[], Sequence[Node]],
    folder: Path,
    limits: Limits = SOON,
) -> tuple[Reprovisioning, "Queue[CommandEnded]"]:
    ended: Queue[CommandEnded] = Queue()
    logs = folder / "logs"
    return Reprovisioning(command, missing, ended.put, folder, logs, limits), ended


def test_it_is_given_what_is_missing_and_no_more_than_this_process_has(tmp_path: Path):
    notes = tmp_path / "notes"
    notes.mkdir()
    words = ["$HOME", "a b", "; touch x", "`id`"]
    command = [*script(tmp_path), str(notes), *words]
    made, ended = asking(command, lambda: [SPOT], tmp_path)
    with made:
        found = ended.get(timeout=20.0)
    assert (found.nodes, found.code, found.error) == (("spot-1",), 0, "")
    told = json.loads((notes / "0.json").read_text())
    assert told["words"] == words  # unchanged: no shell has read them
    read = json.loads(told["read"])
    assert read == {
        "run_dir": str(tmp_path),
        "attempt": 1,
        "missing": [
            {
                "name": "spot-1",
                "device": "L4",
                "count": 8,
                "hosts": 2,
                "zone": "east",
                "spot": True,
            }
        ],
    }
    own = {"LC_CTYPE", "COLUMNS", "LINES"}  # of Python and its libraries
    assert {*told["variables"]} - {*os.environ} <= own
    assert (tmp_path / "logs/reprovision.log").read_text().startswith("asked\n")


def test_it_runs_one_at_a_time_with_longer_and_longer_pauses_while_nodes_are_missing(
    tmp_path: Path,
):
    slow = "import time; time.sleep(0.2)"
    there: list[Node] = [SPOT]
    made, ended = asking(script(tmp_path, slow), lambda: there, tmp_path)
    with made:
        ends_s = []
        for _ in range(4):
            assert ended.get(timeout=20.0).code == 0
            ends_s.append(time.monotonic())
        there.clear()
        with pytest.raises(Empty):
            for _ in range(2):  # one may have started
                ended.get(timeout=1.0)
        there.append(SPOT)
        assert ended.get(timeout=20.0).code == 0
    # each slept 0.2 s, after pauses of 0.05, 0.1 and 0.2 s
    gaps_s = [b - a for a, b in zip(ends_s, ends_s[1:], strict=False)]
    least_s = [0.25, 0.3, 0.4]
    assert all(gap_s >= least for gap_s, least in zip(gaps_s, least_s, strict=True))


def test_so_many_an_hour_and_no_more(tmp_path: Path):
    limits = Limits(first_pause_s=0.01, longest_pause_s=0.01, most_per_hour=3)
    made, ended = asking(script(tmp_path, ""), lambda: [SPOT], tmp_path, limits)
    with made:
        for _ in range(3):
            ended.get(timeout=20.0)
        with pytest.raises(Empty):
            ended.get(timeout=1.0)


# starts another process, prints its id, and neither ends nor reads
HANGS = """
import pathlib, subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(other.pid))
time.sleep(600)
"""


def is_there(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return False


@pytest.mark.parametrize("is_ended_by", ["limit", "run"])
def test_one_that_hangs_is_ended_with_all_that_it_has_started(
    tmp_path: Path, is_ended_by: str
):
    file = tmp_path / "pid"
    seconds = 2.0 if is_ended_by == "limit" else 600.0
    limits = Limits(command_s=seconds, first_pause_s=0.05)
    command = [*script(tmp_path, HANGS), str(file)]
    made, ended = asking(command, lambda: [SPOT], tmp_path, limits)
    with made:
        while not (file.exists() and file.read_text()):
            time.sleep(0.01)
        if is_ended_by == "limit":
            assert ended.get(timeout=20.0).error == "timeout of 2 s"
    found = None if is_ended_by == "limit" else ended.get(timeout=1.0)
    assert found is None or found.error == "end of the run"
    end_s = time.monotonic() + 10.0
    while is_there(int(file.read_text())) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not is_there(int(file.read_text()))


def test_one_that_fails_or_cannot_start_is_said_to(tmp_path: Path):
    made, ended = asking(script(tmp_path, "exit(3)"), lambda: [SPOT], tmp_path)
    with made:
        assert ended.get(timeout=20.0).code == 3
    made, ended = asking([str(tmp_path / "none")], lambda: [SPOT], tmp_path)
    with made:
        found = ended.get(timeout=20.0)
    assert (found.code, found.error) == (None, "No such file or directory")


def test_what_is_typed_is_split_as_a_shell_would_and_looked_for():
    assert split_command("sh -c 'echo a b'", "ssh") == ("sh", "-c", "echo a b")
    for typed in ("", "no-such-program x", "sh 'open"):
        with pytest.raises(BadInput) as told:
            split_command(typed, "ray")
        assert told.value.got.startswith(f"--reprovision {typed!r}")
    with pytest.raises(BadInput, match=r"--launcher ray \(or slurm"):
        split_command("sh", "processes")
