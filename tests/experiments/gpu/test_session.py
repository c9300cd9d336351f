# SPDX-License-Identifier: Apache-2.0
"""A session ends in time whatever a part does, and its results are on disk."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from experiments.gpu import page, session
from experiments.gpu.claims import CLAIMS, Claim, at_least, at_most, is_so, near
from experiments.gpu.part import run_part
from experiments.gpu.parts import PARTS, USUAL_S
from experiments.gpu.rows import PartFile, PartResult, Row, without_names
from experiments.gpu.setting import OutOfTime, Setting, Skipped
from experiments.gpu.time_box import MARK, run_boxed

FIGURE = Row(what="rate", measured=5.0, unit="tokens/s", predicted=4.0)
_ADD = f"""
import sys, time
from pathlib import Path
from experiments.gpu.rows import PartFile, Row
file = PartFile(Path(sys.argv[1]), sys.argv[2])
file.add({FIGURE!r})
"""
DOES = {
    "runs": _ADD + "file.end('done', 0.5)",
    "speed": _ADD + "time.sleep(600)",  # hangs
    "priors": _ADD + "raise SystemExit('the card fell off')",  # never calls `end`
    "memory": _ADD + "import os; os.kill(os.getpid(), 9)",
    "bits": _ADD + "file.end('skipped', 0.5, 'no second card')",
    "islands": "import signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)",
}

Parts = Callable[[dict[str, str]], None]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    """A function that makes the parts run these scripts."""

    def do(scripts: dict[str, str]) -> None:
        def command(name: str, output: Path, *_: object) -> list[str]:
            return [sys.executable, "-c", scripts[name], str(output), name]

        monkeypatch.setattr(session, "_command", command)

    return do


def ended(output: Path) -> dict[str, PartResult]:
    return {part.name: part for part in session.results(output)}


@pytest.mark.nightly
def test_each_part_ends_in_its_own_way_and_keeps_its_rows(tmp_path: Path, parts: Parts):
    parts(DOES)
    begin_s = time.monotonic()
    session.run_session([*DOES], tmp_path, 16.0, [])
    assert time.monotonic() - begin_s < 16.0 + 8.0  # the machine is shared
    found = ended(tmp_path)
    assert {name: found[name].state for name in DOES} == {
        "runs": "done",
        "speed": "out of time",
        "priors": "out of time",  # the part before it used up the time
        "memory": "out of time",
        "bits": "out of time",
        "islands": "out of time",
    }
    assert all(found[name].rows == (FIGURE,) for name in ("runs", "speed"))
    assert "the session had no time left for it" in found["bits"].why


def test_parts_that_fail_cost_the_others_nothing(tmp_path: Path, parts: Parts):
    parts(DOES)
    names = ["priors", "memory", "bits", "runs"]
    session.run_session(names, tmp_path, 60.0, [])
    found = ended(tmp_path)
    states = {name: found[name].state for name in names}
    assert states == {
        "priors": "failed",
        "memory": "failed",
        "bits": "skipped",
        "runs": "done",
    }
    assert "the card fell off" in found["priors"].why
    assert "exit code -9" in found["memory"].why
    assert all(found[name].rows == (FIGURE,) for name in names)
    text = (tmp_path / "session.md").read_text()
    assert "skipped: no second card" in text and "the card fell off" in text
    assert "| rate | 5 | tokens/s | 4 | 1.25 |" in text
    written = json.loads((tmp_path / "session.json").read_text())
    assert [part["name"] for part in written["parts"]] == [*PARTS]


def test_the_rest_goes_on_with_what_is_not_done(tmp_path: Path, parts: Parts):
    parts(DOES)
    session.run_session(["runs", "bits"], tmp_path, 30.0, [])
    rest = session.chosen(["rest"], tmp_path)
    assert rest == [name for name in PARTS if name != "runs"]
    assert session.chosen(["memory", "runs"], tmp_path) == ["runs", "memory"]
    assert session.chosen([], tmp_path) == [*PARTS]
    parts({"bits": DOES["runs"]})
    session.run_session(["bits"], tmp_path, 30.0, [])
    assert ended(tmp_path)["bits"] == PartResult(
        name="bits", state="done", rows=(FIGURE,), took_s=0.5
    )
    assert ended(tmp_path)["runs"].state == "done"  # from the first session


def test_a_stopped_session_says_what_it_has(tmp_path: Path, parts: Parts):
    parts(DOES)
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    signal.signal(signal.SIGTERM, session._stop)
    try:
        script = f"sleep 4; kill -TERM {os.getpid()}"
        stopper = subprocess.Popen(["sh", "-c", script])
        with pytest.raises(session.Stopped):
            session.run_session(["speed", "runs"], tmp_path, 60.0, [])
        stopper.wait()
    finally:
        signal.signal(signal.SIGTERM, handlers[0])
        signal.signal(signal.SIGINT, handlers[1])
    assert ended(tmp_path)["speed"].state == "stopped"
    assert ended(tmp_path)["speed"].rows == (FIGURE,)
    assert ended(tmp_path)["runs"].state == "not begun"
    assert "stopped: the session was stopped" in (tmp_path / "session.md").read_text()


def test_a_part_that_hangs_is_asked_to_end_at_its_limit(tmp_path: Path):
    hangs = """
import pathlib, signal, sys, time
there = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit((there / "asked").touch()))
time.sleep(5)
(there / "late").touch()
"""
    command = [sys.executable, "-c", hangs, str(tmp_path)]
    assert run_boxed(command, 2.0, tmp_path / "log.txt") is None
    assert (tmp_path / "asked").exists() and not (tmp_path / "late").exists()


def test_nothing_that_a_part_started_outlives_its_box(tmp_path: Path):
    """Neither a daemon in another process group, nor a process that ignores SIGTERM."""
    script = "mktemp; trap '' TERM; setsid sleep 611 & sleep 611"
    begin_s = time.monotonic()
    assert run_boxed(["sh", "-c", script], 1.0, tmp_path / "log") is None
    assert time.monotonic() - begin_s < 1.0 + 8.0
    assert not [*_marked(b"611")]
    left = Path((tmp_path / "log").read_text().strip())
    assert left.is_absolute() and not left.exists()


def test_a_part_ends_with_a_session_that_is_killed(tmp_path: Path):
    part = "import experiments.gpu.part as p; print('begun', flush=True); "
    part += "p.threading.Thread(target=p._end_with_session, daemon=True).start(); "
    part += "import time; time.sleep(613)"
    boxed = "from experiments.gpu.time_box import run_boxed; from pathlib import Path; "
    boxed += f"run_boxed([{sys.executable!r}, '-c', {part!r}], 99, Path('log'))"
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    killed = subprocess.Popen(
        [sys.executable, "-c", boxed], cwd=tmp_path, env=environment
    )
    _wait_until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text())
    killed.kill()
    killed.wait()
    _wait_until(lambda: not [*_marked(b"613")])


def _wait_until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def _marked(seconds: bytes) -> Iterator[str]:
    """Yield processes that carry a session's mark and sleep this long."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
            if seconds in words and MARK.encode() in (process / "environ").read_bytes():
                yield words.decode()
        except OSError:
            continue


def test_half_a_line_is_left_out(tmp_path: Path):
    file = PartFile(tmp_path, "runs")
    file.begin(30)
    file.add(FIGURE)
    with file.path.open("a") as half:
        half.write('{"row": {"what": "ra')
    assert file.read() == PartResult(
        name="runs",
        state="stopped",
        rows=(FIGURE,),
        why="its session was killed before the part ended",
    )


def test_results_do_not_name_the_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("socket.gethostname", lambda: "node17.lab")
    text = f"Error in {Path.cwd()}/x.py, {Path.home()}/y.py on node17.lab"
    assert without_names(text) == "Error in ./x.py, ~/y.py on HOST"


def test_results_have_no_paths(tmp_path: Path):
    text = "'/usr/lib/python3.12/json.py', line 1: /tmp/a-1/run.toml, tokens/s of 1/2"
    assert without_names(text) == "'json.py', line 1: run.toml, tokens/s of 1/2"
    address = "see https://docs.jax.dev/en/latest/"
    assert without_names(address) == address
    file = PartFile(tmp_path, "runs")
    file.begin(30)
    file.add(Row(what="rate", measured=5.0, note="by /tmp/a/b/plan.json"))
    assert file.read().rows == (Row(what="rate", measured=5.0, note="by plan.json"),)


@pytest.mark.parametrize(
    ("reason", "state"), [(OutOfTime, "out of time"), (Skipped, "skipped")]
)
def test_a_part_says_itself_how_it_ended(
    reason: type[Exception], state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def measure(setting: Setting) -> Iterator[Row]:
        yield FIGURE
        raise reason("one run had not ended")

    monkeypatch.setattr("experiments.gpu.parts.runs.measure", measure)
    file = PartFile(tmp_path, "runs")
    file.begin(30)
    run_part("runs", file, Setting())
    found = file.read()
    assert (found.state, found.why) == (state, "one run had not ended")
    assert found.rows == (FIGURE,)


def test_all_parts_need_two_sessions_of_the_usual_time():
    """As the documentation says: about twelve minutes."""
    needed_s = sum(part.limit_s for part in PARTS.values())
    assert USUAL_S < needed_s <= 2 * USUAL_S


@pytest.mark.parametrize("name", PARTS)
def test_each_part_has_its_module(name: str):
    assert callable(importlib.import_module(f"experiments.gpu.parts.{name}").measure)


def test_claims_are_judged_by_their_rows(monkeypatch: pytest.MonkeyPatch):
    def claim(what: str, holds: Callable[[Row], bool]) -> Claim:
        return Claim(text="t", where="w", part="runs", what=what, holds=holds)

    def verdicts(claims: Sequence[Claim]) -> list[str]:
        monkeypatch.setattr(page, "CLAIMS", claims)
        part = PartResult(name="runs", state="done", rows=(FIGURE, answer))
        return [page._judged(claim, [part])[-1] for claim in claims]

    answer = Row(what="equal", measured=True)
    holds, fails = "holds", "**does not hold**"
    assert verdicts(
        [
            claim("rate", at_least(5)),
            claim("rate", at_least(5.1)),
            claim("rate", at_most(4.9)),
            claim("rate", near(0.25)),
            claim("rate", near(0.2)),
            claim("equal", is_so),
            claim("equal", at_least(0)),
            claim("unheard of", is_so),
        ]
    ) == [holds, fails, fails, holds, fails, holds, fails, "not measured"]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.what)
def test_a_claim_is_said_where_it_is_said_to_be(claim: Claim):
    assert Path(claim.where.split(":")[0]).exists()
    assert claim.part in PARTS
