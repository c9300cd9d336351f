# SPDX-License-Identifier: Apache-2.0
"""The experiment that kills workers stores what runs report, and resumes.

The runs here are small programs instead of training.
"""

import json
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.recovery import kills

# Trains one step with a worker, and ends when the worker is gone: argv is the run
# directory and the exit code.
RUN = """
import json, pathlib, subprocess, sys
run_dir, code = pathlib.Path(sys.argv[1]), int(sys.argv[2])
(run_dir / "logs").mkdir(parents=True, exist_ok=True)
(run_dir / "checkpoints").mkdir(exist_ok=True)
step = {"step": 1, "loss": 2.0}
(run_dir / "metrics.jsonl").write_text(json.dumps(step) + "\\n")
print("\\nstep 1/1", flush=True)
if run_dir.parent.name.startswith("run"):
    with (run_dir / "logs" / "east.log").open("w") as log:
        worker = [sys.executable, "-c", "import time; time.sleep(60)"]
        subprocess.run(worker, stdout=log)
finished = {"event": "finished", "step": 1, "time": "2026-08-01T09:30:00+00:00"}
(run_dir / "events.jsonl").write_text(json.dumps(finished) + "\\n")
print("last words", file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that runs the experiment; runs in `failing` end with code 7."""
    monkeypatch.setattr(kills, "_PAUSE_S", (0.0, 0.05))
    monkeypatch.setattr(kills, "_LOOK_S", 0.02)
    failing = set[str]()

    def command(run_dir: Path, steps: int, launcher: str, *more: str) -> list[str]:
        code = 7 if run_dir.parent.name in failing else 0
        return [sys.executable, "-c", RUN, str(run_dir), str(code)]

    monkeypatch.setattr(kills, "command", command)

    def started(seed: int, num_kills: int, *fail: str) -> list[dict[str, Any]]:
        failing.update(fail)
        words = ["--seed", str(seed), "--kills", str(num_kills), "--steps", "1"]
        kills.main([*words, "--folder", str(tmp_path)])
        return kills.read_results(tmp_path / "results.jsonl")

    return started


def test_a_second_start_goes_on_and_seeds_share_a_file(start, tmp_path, capsys):
    assert [line["run"] for line in start(5, 2)] == [0, 1]
    assert [line["run"] for line in start(5, 2)] == [0, 1]  # all of them are done
    results = tmp_path / "results.jsonl"
    results.write_text(results.read_text() + '{"seed": 5, "ki')  # truncated write
    (tmp_path / "processes-seed5-1" / "run2").mkdir()  # given up
    told = [(line["seed"], line["run"]) for line in start(5, 3)]
    assert told == [(5, 0), (5, 1), (5, 3)]
    capsys.readouterr()
    told = [(line["seed"], line["run"]) for line in start(6, 1)]
    assert told == [(5, 0), (5, 1), (5, 3), (6, 0)]
    out, err = capsys.readouterr()
    assert "run 0: code 0, kills east; as expected; 1 of 1" in err
    shown = [
        (s["seed"], s["runs"], s["kills"], s["wrong"]) for s in json.loads(out)["seeds"]
    ]
    assert shown == [(5, 3, 3, []), (6, 1, 1, [])]


def test_a_run_that_ends_unexpectedly_is_told_of_and_kept_whole(start, tmp_path):
    good, bad = start(5, 2, "run1")
    assert (good["code"], good["wrong"], good["kills"]) == (0, [], ["east"])
    assert (bad["code"], bad["wrong"], bad["finished"]) == (
        7,
        ["exit code 7: see its stderr"],
        True,
    )
    for line in (good, bad):
        folder = Path(line["folder"])
        assert (folder / "stderr").read_text() == "last words\n"
        assert "step 1/1" in (folder / "stdout").read_text()
        assert (folder / "run" / "logs" / "east.log").exists()
    assert not (Path(good["folder"]) / "run" / "checkpoints").exists()
    assert (Path(bad["folder"]) / "run" / "checkpoints").exists()


def test_other_losses_are_found(start, tmp_path):
    start(5, 0)  # the run without kills
    metrics = tmp_path / "whole-processes-1" / "run" / "metrics.jsonl"
    whole = [{"step": 1, "loss": 2.0000001}]
    folder = tmp_path / "processes-seed5-1" / "run0"
    ended = kills.killed_run(folder, 1, "processes", None, random.Random(0), 1)
    same = kills.outcome(folder, "processes", None, ended, kills.losses(metrics.parent))
    assert same["wrong"] == []
    other = kills.outcome(folder, "processes", None, ended, whole)
    assert other["wrong"] == ["losses differ"]


def test_only_an_evaluation_where_the_plan_changed_may_round_otherwise():
    whole = [{"step": n, "loss": 6.0 + n} for n in range(3)]
    whole.insert(2, {"step": 1, "val_loss": 6.101469993591309})
    found = [dict(line) for line in whole]
    found[2]["val_loss"] = 6.101470311482747  # as seen
    assert kills.alike(found, whole, 1) and not kills.alike(found, whole, 2)
    assert not kills.alike(found[:-1], whole, 1)
    found[2]["val_loss"] = 6.1015
    assert not kills.alike(found, whole, 1)
    found[2], found[1] = whole[2], {"step": 1, "loss": 7.0000001}
    assert not kills.alike(found, whole, 1)


def test_one_that_does_not_end_says_where_it_stands(tmp_path):
    words = [sys.executable, "-c", "import time\nprint(1, flush=True)\ntime.sleep(60)"]
    run = kills.started(words, tmp_path)
    while not (tmp_path / "stdout").read_bytes():
        assert run.poll() is None
    assert kills._ended(run, 0.0) == -signal.SIGABRT
    assert "line " in (tmp_path / "stderr").read_text()
