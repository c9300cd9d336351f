# SPDX-License-Identifier: Apache-2.0
"""What users see: plain lines, a live bar, and every warning."""

import io
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from hetjax.errors import BadInput, RunFailed
from hetjax.report import progress
from hetjax.report.progress import Display, display, metrics_line

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
CURSOR_BACK, ERASED = "\x1b[?25h", "\x1b[2K"  # control sequences to a terminal
STEP = {
    "step": 7,
    "loss": 2.5,
    "tokens": 64,
    "step_time_s": 0.5,
    "tokens_per_s": 12345.6,
    "grad_norm": 0.25,
    "learning_rate": 0.0003,
}


def test_lines_are_aligned_and_named_like_the_metrics():
    assert metrics_line(STEP, 100) == (
        "step   7/100  loss 2.5000  grad_norm 0.250  learning_rate 3.00e-04  "
        "tokens_per_s 12,346"
    )
    evaluation = {"step": 100, "val_loss": 2.0, "val_bits_per_byte": 1.25}
    assert metrics_line(evaluation, 100) == (
        "step 100/100  val_loss 2.0000  val_bits_per_byte 1.2500"
    )


def test_without_a_terminal_there_are_plain_lines_and_warnings_among_them(
    capsys: pytest.CaptureFixture[str],
):
    with display(8) as shown:
        assert type(shown) is Display
        shown.note("model: small")
        shown.doing("preparing the programs")
        shown.compiled(1, 2)
        shown.compiled(2, 2)
        warnings.warn("the disk is slow", stacklevel=1)
        shown.trained(STEP)
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines() == [
        "model: small",
        "preparing the programs",
        "compiled 1/2 programs",
        "compiled 2/2 programs",
        "warning: the disk is slow",
        metrics_line(STEP, 8),
    ]


def test_a_quiet_run_shows_warnings_alone_and_its_log_has_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    log = tmp_path / "log.txt"
    error = RunFailed(got="x", allowed="y", fix="z")
    with progress.quiet_if(True), pytest.raises(RunFailed):
        with display(8, log) as shown:
            shown.note("model: small")
            shown.doing("preparing the programs")
            assert not log.exists()
            shown.begun()
            warnings.warn("the disk is slow", stacklevel=1)
            shown.trained(STEP)
            raise error
    assert capsys.readouterr() == ("", "warning: the disk is slow\n")
    lines = log.read_text().splitlines()
    assert [line.partition("+00:00 ")[2] or line for line in lines] == [
        "model: small",
        "preparing the programs",
        "warning: the disk is slow",
        metrics_line(STEP, 8),
        "error",
        *str(error).splitlines(),
    ]
    before = log.read_text()
    with pytest.raises(BadInput), display(8, log) as shown:
        shown.note("looking for devices")
        raise BadInput(got="x", allowed="y", fix="z")
    assert log.read_text() == before
    with pytest.raises(KeyboardInterrupt), display(8, log) as shown:
        shown.note("looking for devices")
        raise KeyboardInterrupt
    added = log.read_text().removeprefix(before).splitlines()
    assert [line.partition(" ")[2] for line in added] == [
        "looking for devices",
        "interrupted",
    ]


def test_of_fast_steps_few_lines_are_printed_but_the_last_one_always(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    clock = iter([100.0 + 0.75 * k for k in range(9)])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    shown = Display(9, interval_s=2.0)
    for step in range(1, 10):
        shown.trained({"step": step})
    steps = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert steps == ["1/9", "4/9", "7/9", "9/9"]


def test_compiling_many_programs_prints_the_first_and_every_quarter(
    capsys: pytest.CaptureFixture[str],
):
    shown = Display(1)
    for done in range(1, 41):
        shown.compiled(done, 40)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"compiled {done}/40 programs" for done in (1, 10, 20, 30, 40)]


def terminal() -> tuple[Console, io.StringIO]:
    """Return a console on a wide terminal, and the stream that records its output."""
    screen = io.StringIO()
    return Console(file=screen, force_terminal=True, width=140), screen


def test_a_terminal_shows_the_same_numbers_in_one_moving_line(
    monkeypatch: pytest.MonkeyPatch,
):
    console, screen = terminal()
    monkeypatch.setattr(progress, "Console", lambda: console)
    with display(100) as shown:
        shown.doing("reading [all] of it")
        shown.compiled(1, 2)
        shown.trained(STEP)
        shown.note("[sample] 'x'")
    assert metrics_line(STEP, 100) in screen.getvalue()
    assert "[sample] 'x'" in screen.getvalue()
    # the step's line stays, without repetition
    assert metrics_line(STEP, 100) in screen.getvalue().rpartition(ERASED)[2]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_was_being_done_is_gone_when_it_ends_and_the_cursor_is_back(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
):
    console, screen = terminal()
    monkeypatch.setattr(progress, "Console", lambda: console)
    with pytest.raises(error), display(100) as shown:
        shown.doing("reading all of it")
        raise error
    last = screen.getvalue().rpartition(ERASED)[2]
    assert "reading" not in last and last.endswith(CURSOR_BACK)


def test_ctrl_c_just_when_the_line_changes_is_no_other_error(
    monkeypatch: pytest.MonkeyPatch,
):
    console, _ = terminal()
    monkeypatch.setattr(progress, "Console", lambda: console)
    add = Progress.add_task

    def add_and_stop(bar: Progress, what: str, total: float | None) -> None:
        add(bar, what, total=total)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), display(100) as shown:
        shown.doing("reading all of it")
        monkeypatch.setattr(Progress, "add_task", add_and_stop)
        shown.doing("training the tokenizer")


def test_a_line_moves_while_a_command_waits(monkeypatch: pytest.MonkeyPatch):
    for where in ("display", "working"):
        console, screen = terminal()
        monkeypatch.setattr(progress, "Console", lambda c=console, **_: c)
        begin_s = time.monotonic()
        with ExitStack() as stack:
            if where == "display":
                stack.enter_context(display(100)).doing("waiting")
            else:
                stack.enter_context(progress.working("waiting"))
            # no message comes from here on
            while "0:00:02" not in screen.getvalue():
                assert time.monotonic() - begin_s < PATIENCE_S, screen.getvalue()
                time.sleep(0.1)
        assert "0:00:01" in screen.getvalue()


def test_quiet_work_shows_nothing(capfd: pytest.CaptureFixture[str]):
    with progress.working("planning", quiet=True) as told:
        told("12 plans")
    assert capfd.readouterr() == ("", "")


def test_without_a_terminal_work_is_told_in_lines(capfd: pytest.CaptureFixture[str]):
    with progress.working("planning") as told:
        told("12 plans")
    assert capfd.readouterr() == ("", "12 plans\n")


def typed(arguments: list[str], stop_at: str | None = None) -> tuple[int, str]:
    """Run `train` on a terminal; return its exit code and all that was on the screen.

    Type Ctrl-C once `stop_at` is on the screen.
    """
    ours, theirs = os.openpty()
    words = [sys.executable, "-m", "hetjax.train", *arguments]
    env = os.environ | {"TERM": "xterm", "COLUMNS": "140"}
    # a background process ignores Ctrl-C, and so would its children
    was = signal.signal(signal.SIGINT, signal.default_int_handler)
    child = subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, env=env, process_group=0
    )
    signal.signal(signal.SIGINT, was)
    os.close(theirs)
    screen = ""
    while piece := _read(ours):
        screen += piece.decode(errors="replace")
        if stop_at is not None and stop_at in screen:
            os.killpg(child.pid, signal.SIGINT)
            stop_at = None
    os.close(ours)
    return child.wait(PATIENCE_S), screen


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65_536)
    except OSError:  # the other end is closed
        return b""


def arguments_in(folder: Path) -> list[str]:
    """Return the arguments to plan and train `tiny` for two steps on one device."""
    node = '[[node]]\nname = "a"\ndevice = "A10G"\ncount = 1\n'
    (folder / "one.toml").write_text(f'name = "one"\n{node}')
    said = f"--cluster {folder}/one.toml --run-dir {folder}/run --steps 2"
    (folder / "text.txt").write_text((ROOT / "LICENSE").read_text())
    said += f" --data.path {folder}/text.txt --data.cache-dir {folder}/cache"
    said += " --evaluation.num-batches 1 --evaluation.sample-tokens 0"
    return ["tiny", *said.split()]


@pytest.mark.usefixtures("environment")
def test_a_terminal_is_told_what_every_phase_of_a_start_takes(tmp_path: Path):
    code, screen = typed(arguments_in(tmp_path))
    assert code == 0, screen
    for phase in (
        "looking for devices",
        r"planning for 1 device\b",
        "reading [^ ]*",
        "training the tokenizer",
        "turning the text into tokens",
        "preparing the programs",
        r"compiled \d+/\d+ programs",
        "the first step",
        r"step 2/2",
    ):
        clocked = rf"{phase}[^\r\n]*\d:\d\d:\d\d"
        assert re.search(clocked, screen), f"{phase} is not shown with a clock"
    assert screen.rindex(CURSOR_BACK) > screen.rindex("step 2/2")


@pytest.mark.usefixtures("environment")
def test_ctrl_c_leaves_a_clean_terminal(tmp_path: Path):
    code, screen = typed(arguments_in(tmp_path), stop_at="preparing the programs")
    assert code == 1 and "Traceback" not in screen
    (last,) = screen.rpartition(CURSOR_BACK)[2].splitlines()
    assert last.startswith("hetjax: interrupted; the same command resumes")


def test_a_log_is_told_what_is_being_done_only_after_a_silence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    with progress.working("starting"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "_SILENCE_S", 0.01)
    told = io.StringIO()
    with monkeypatch.context() as patch, progress.working("starting"):
        patch.setattr(sys, "stderr", told)
        until_s = time.monotonic() + PATIENCE_S
        while not told.getvalue().endswith("\n") and time.monotonic() < until_s:
            time.sleep(0.01)
    assert told.getvalue() == "starting ...\n"
