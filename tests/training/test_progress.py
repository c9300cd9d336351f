# SPDX-License-Identifier: Apache-2.0
"""What people see: plain lines, a live bar, and no warning lost."""

import io
import warnings

import pytest
from rich.console import Console
from rich.progress import Progress

from hetjax.training import progress
from hetjax.training.progress import LiveDisplay, PlainDisplay, display, metrics_line

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
        assert isinstance(shown, PlainDisplay)
        shown.note("model: small")
        shown.compiled(1, 2)
        shown.compiled(2, 2)
        warnings.warn("the disk is slow", stacklevel=1)
        shown.trained(STEP)
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines() == [
        "model: small",
        "compiled 1/2 programs",
        "compiled 2/2 programs",
        "warning: the disk is slow",
        metrics_line(STEP, 8),
    ]


def test_of_fast_steps_few_lines_are_printed_but_the_last_one_always(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    clock = iter([100.0 + 0.75 * k for k in range(9)])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    shown = PlainDisplay(9, interval_s=2.0)
    for step in range(1, 10):
        shown.trained({"step": step})
    steps = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert steps == ["1/9", "4/9", "7/9", "9/9"]


def test_compiling_many_programs_prints_four_lines(capsys: pytest.CaptureFixture[str]):
    shown = PlainDisplay(1)
    for done in range(1, 41):
        shown.compiled(done, 40)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"compiled {done}/40 programs" for done in (10, 20, 30, 40)]


def test_a_terminal_shows_the_same_numbers_in_one_moving_line():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with Progress("{task.description}", console=console) as bar:
        shown = LiveDisplay(bar, 100)
        shown.compiled(1, 2)
        shown.trained(STEP)
        shown.note("[sample] 'x'")
    assert metrics_line(STEP, 100) in screen.getvalue()
    assert "[sample] 'x'" in screen.getvalue()
    assert len(bar.tasks) == 1 and bar.tasks[0].completed == 7
