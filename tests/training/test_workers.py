# SPDX-License-Identifier: Apache-2.0
"""`train --launcher processes`: the run of one process, on workers that may die."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hetjax.launchers.local_processes import Processes
from hetjax.train import main
from hetjax.training.directory.rundir import LOGS
from tests import forked_workers, jax_settings
from tests.training.small import LICENCE

SETTINGS = "--evaluation.sample-tokens 2 --evaluation.num-batches 1".split()
SETTINGS += ["--checkpoint.every", "2"]


def set_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers import once and compile quickly; their rounding differs from here."""
    monkeypatch.setattr(Processes, "_started", forked_workers.started)
    flags = os.environ.get("XLA_FLAGS", ""), *jax_settings.quick_flags()
    monkeypatch.setenv("XLA_FLAGS", " ".join(flags))
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def command(run_dir: Path, cache: Path, *options: str) -> list[str]:
    text = cache.with_suffix(".txt")
    text.write_text(LICENCE.read_text())
    stored = ["--data.path", str(text), "--data.cache-dir", str(cache)]
    return ["tiny", "--run-dir", str(run_dir), *SETTINGS, *stored, *options]


def losses(run_dir: Path) -> list[float]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line.get("loss", line.get("val_loss")) for line in lines]


def processes_of(run_dir: Path) -> list[int]:
    """Return the processes whose output goes to the run's logs."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if entry.resolve().is_relative_to((run_dir / LOGS).resolve()):
                found.append(int(entry.parts[2]))
        except OSError:
            continue
    return found


@pytest.mark.usefixtures("environment")
def test_a_run_goes_on_in_one_process_as_if_it_had_never_had_workers(
    tmp_path: Path, cache: Path
):
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    workers = command(run_dir, cache, "--steps", "4", "--stop-after", "2")
    assert main([*workers, "--launcher", "processes"]) == 4
    assert not processes_of(run_dir)
    assert main(command(run_dir, cache, "--steps", "4")) == 0
    assert main(command(whole, cache, "--steps", "4")) == 0
    assert losses(run_dir) == pytest.approx(losses(whole), rel=1e-5)
    assert len(losses(whole)) == 6


@pytest.mark.usefixtures("environment")
def test_a_trace_shows_the_devices_of_all_workers_on_one_clock(
    tmp_path: Path, cache: Path
):
    run_dir = tmp_path / "run"
    options = ["--steps", "1", "--trace", "--launcher", "processes"]
    assert main(command(run_dir, cache, *options)) == 0
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    passes = [e for e in events if e["ph"] == "X" and e["cat"] in ("F", "B", "FB")]
    nodes = {e["pid"] for e in passes}
    assert len(nodes) == 3
    plan = json.loads((run_dir / "plan.json").read_text())
    assert plan["replicas"][0]["num_microbatches"] > 1
    # a pass starts after the pass whose output it reads, on any worker
    starts = {e["name"]: e["ts"] for e in passes}
    late_us = 1e5  # the delay that a busy machine may cause in the observer
    for name, start in starts.items():
        replica, stage, action = name.split(".")
        before = f"{replica}.s{int(stage[1:]) - 1}.F{action.lstrip('FB')}"
        if before in starts and action.startswith("F"):
            assert start > starts[before] - late_us


@pytest.mark.usefixtures("environment")
def test_an_interrupt_while_workers_start_leaves_none_behind(tmp_path: Path):
    run = training(tmp_path)
    # a worker that imports may briefly have its own process
    assert len(processes_of(tmp_path / "run")) >= 3
    run.send_signal(signal.SIGINT)
    _, told = run.communicate(timeout=30)
    assert run.returncode == 1 and "hetjax: interrupted" in told
    assert not processes_of(tmp_path / "run")


def training(tmp_path: Path) -> subprocess.Popen[str]:
    """Start a run and return it once it has named its workers."""
    options = command(tmp_path / "run", tmp_path / "cache", "--launcher", "processes")
    run = subprocess.Popen(
        [sys.executable, "-m", "hetjax.train", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # SIGINT is handled, which it is not in a background process
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith("workers"):
            break
    return run


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--cluster", "none.toml"], "cluster file 'none.toml'"),
    ],
)
def test_what_workers_cannot_do_is_said_before_any_is_started(
    tmp_path: Path,
    options: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    run_dir = tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    arguments = command(run_dir, tmp_path, "--launcher", "processes", *options)
    assert main(arguments) == 2
    assert told in capsys.readouterr().err
    assert not run_dir.exists()
