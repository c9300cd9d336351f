# SPDX-License-Identifier: Apache-2.0
"""Closed readers and signals at any instant: no traceback, and no lost work.

An instant is a count of Python audit events, which imports, opened files and compiled
programs raise: these are the same on a slow machine.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetjax.__main__ import COMMANDS
from hetjax.cli.command import write_outputs
from hetjax.errors import BadInput
from tests.short_runs import draws
from tests.training.test_workers import set_environment

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300
_COUNTED = """
import os, signal, sys
from hetjax.__main__ import main

number_and_events, kept, *words = sys.argv[1:]
number, *events = map(int, number_and_events.split(","))
count = 0

def hear(event, arguments):
    global count
    count += 1
    if count in events:
        os.kill(os.getpid(), number)

signal.signal(signal.SIGINT, signal.default_int_handler)  # also in the background
sys.addaudithook(hear)
sys.argv = ["hetjax", *words]
code = main()
if kept:
    open(kept, "w").write(str(count))
sys.exit(code)
"""
_ON_TERMINAL = (
    "import os, sys; os.login_tty(int(sys.argv[1])); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)
CODES = {  # also killed as Python exits, when no handler is left
    signal.SIGINT: {0, 1, 4, -signal.SIGINT},
    signal.SIGTERM: {0, 4, 143, -signal.SIGTERM},
}


def words(name: str) -> list[str]:
    return [sys.executable, "-m", f"hetjax.{name}"]


def ended_unread(command: Sequence[str], folder: Path) -> tuple[int, str]:
    """Return exit code and errors of a command whose output has no reader."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command, cwd=folder, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_may_leave_any_command(name: str, tmp_path: Path):
    assert ended_unread([*words(name), "--help"], tmp_path) == (0, "")


@pytest.mark.parametrize(
    "command",
    [
        [*words("simulate"), "tiny"],
        pytest.param(
            [*words("plan"), "tiny", "--compare", "none", "--search-s", "1"],
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["simulate", "plan"],
)
def test_files_are_written_though_nobody_reads_the_result(
    command: list[str], tmp_path: Path
):
    command = [*command, "-q", "--output", "plan.json"]
    assert ended_unread(command, tmp_path) == (0, "")
    assert json.loads((tmp_path / "plan.json").read_text())["predicted"]


def test_files_come_first_and_a_result_is_shown_though_they_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    @dataclass
    class Options:
        first: Path
        second: Path
        json: bool = False

    options = Options(tmp_path / "first", tmp_path / "missing" / "second")
    writers = {
        "first": ("plan: {}", lambda path: path.write_text("whole")),
        "second": ("picture: {}", lambda path: path.write_text("never")),
    }

    def show() -> None:
        assert options.first.read_text() == "whole"
        print("the result of a search")

    with pytest.raises(BadInput, match="--first, --second"):
        write_outputs(options, writers, show)
    lines = ["the result of a search", f"plan: {options.first}"]
    assert capsys.readouterr().out.splitlines() == lines


def test_what_is_printed_into_closed_descriptors_goes_into_no_file(tmp_path: Path):
    """The next file opened would get number 1, or 2."""
    command = [*words("simulate"), "tiny", "--output", "plan.json", "--trace", "t.json"]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
    assert subprocess.run(closed, cwd=tmp_path).returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"plan.json", "t.json"}
    for path in tmp_path.iterdir():
        json.loads(path.read_text())
    refused = subprocess.run([*closed, "--stepz"], cwd=tmp_path)
    assert refused.returncode == 2


@dataclass(frozen=True)
class Trained:
    """A run that lost its terminal: its folder, and how many events it had."""

    folder: Path
    num_events: int


def training(folder: Path) -> list[str]:
    said = f"--run-dir {folder}/run --steps 4 --data.path {folder}/text.txt"
    said += f" --data.cache-dir {folder}/cache --evaluation.num-batches 1"
    return ["train", "tiny", *said.split(), "--evaluation.sample-tokens", "0"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run trained on a terminal that closes midway."""
    folder = tmp_path_factory.mktemp("process")
    (folder / "text.txt").write_text((ROOT / "LICENSE").read_text())
    ours, theirs = os.openpty()
    command = ["-c", _COUNTED, "1", f"{folder}/count", *training(folder)]
    with pytest.MonkeyPatch.context() as patched:
        set_environment(patched)
        child = subprocess.Popen(
            [sys.executable, "-c", _ON_TERMINAL, str(theirs), *command],
            pass_fds=[theirs],
        )
    os.close(theirs)
    screen = ""
    while "the first step" not in screen:
        screen += os.read(ours, 65_536).decode(errors="replace")
    os.close(ours)
    code = child.wait(PATIENCE_S)
    assert code == 0, screen
    num_events = int((folder / "count").read_text())
    return Trained(folder, num_events)


def test_a_run_outlives_its_terminal_and_its_log_tells_how_it_went(trained: Trained):
    log = (trained.folder / "run" / "log.txt").read_text()
    assert "Traceback" not in log
    told = [line.partition(" ")[2] for line in log.splitlines()]
    for begin in ("model: ", "compiled ", "step 1/4 ", "step 4/4 ", "done: 4 steps"):
        assert any(line.startswith(begin) for line in told), begin
    lines = (trained.folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(x)["step"] for x in lines if "grad_norm" in x] == [1, 2, 3, 4]


def ended_by(
    number: signal.Signals, events: Sequence[int], arguments: Sequence[str]
) -> tuple[int, str]:
    """Return exit code and errors of a command that gets the signal at these events."""
    at = ",".join(map(str, [int(number), *events]))
    command = [sys.executable, "-c", _COUNTED, at, "", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, start_new_session=True
    )
    return done.returncode, done.stderr


def check_end(number: signal.Signals, code: int, error: str) -> None:
    assert "Traceback" not in error and "Exception ignored" not in error, error
    assert code in CODES[number], error
    if code in (1, 143):
        assert error.splitlines()[-1].startswith("hetjax: "), error


@pytest.mark.parametrize("number", CODES)
def test_a_signal_at_any_instant_of_a_start_gives_one_line(number: signal.Signals):
    draw = random.Random(int(number))
    for _ in range(6):
        first = draw.randrange(1, 2_500)  # of some 5,000 events
        events = [first, first + draw.choice([1, 30])]
        code, error = ended_by(number, events, ["train", "tiny", "--stepz", "3"])
        check_end(number, code, error)
        assert code in (1, 143) and "nothing was done" in error


@pytest.mark.parametrize("draw_seed", draws(range(4), short=2))
def test_a_signal_at_any_instant_of_a_run_gives_one_line(
    draw_seed: int, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    set_environment(monkeypatch)
    draw = random.Random(draw_seed)
    number = [signal.SIGINT, signal.SIGTERM][draw_seed % 2]
    first = draw.randrange(1, trained.num_events)
    events = [first, first + draw.choice([1, 10, 1_000])][: draw.choice([1, 2])]
    arguments = [*training(trained.folder), "--run-dir", f"{tmp_path}/run"]
    code, error = ended_by(number, events, arguments)
    check_end(number, code, error)


_HANGS = """
import sys, threading
from hetjax.cli.process import end_at_once, process_main

def run(arguments):
    threading.Thread(target=threading.Event().wait).start()  # for ever
    print("done", file=sys.stderr)
    end_at_once()
    return 4

sys.exit(process_main(run, "train")())
"""


def test_a_thread_that_hangs_does_not_keep_a_process_from_its_end():
    done = subprocess.run(
        [sys.executable, "-c", _HANGS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (4, "done\n")
