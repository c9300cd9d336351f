# SPDX-License-Identifier: Apache-2.0
"""Attacks what a run reads and writes: files, disks, stores, its directory, clocks.

Each attack is on a run in one process, started by its own command. Does not own the
runs (`runs.py`).
"""

import json
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from experiments.attacks.attack import Attack, Outcome, unless
from experiments.attacks.on_wire import hostile_names, second_caller
from experiments.attacks.runs import (
    DONE,
    EMBEDDED,
    REFUSED,
    STEPS,
    STOPPED,
    Run,
    run_in,
    unharmed,
)
from experiments.attacks.victim import CALL_S
from hetjax.checkpoint.file_records import record_of_bytes
from hetjax.plans.plan import Replica
from hetjax.plans.plan_files import write_plan
from hetjax.training.directory.rundir import CHECKPOINTS, METRICS
from tests.checkpoint.test_hostile_names import LOOT, OUT, manifest, store_with
from tests.training.pair import TWO_NODES, TWO_REPLICAS

_ANSWER_S = 5.0  # for a call to the store that never answers
_YEAR_S = 365 * 86400
_ROOM_BYTES = 100  # that metrics.jsonl may still grow
CRASH = "Traceback (most recent call last)"


def _same(run: Run, folder: Path) -> bool:
    return run.losses == unharmed(folder, *EMBEDDED)


def store_that_leads_out(folder: Path) -> Outcome:
    run = run_in(folder)
    files = {name: record_of_bytes(LOOT) for name in OUT}
    inner = folder / "a" / "b" / "c"
    inner.mkdir(parents=True)
    store_with(inner, manifest(files=files))
    before = {*folder.rglob("*")}
    code = run.ended(*EMBEDDED, "--checkpoint.cloud", (inner / "store").as_uri())
    known = (run.run_dir, inner / "store", run.attacks, folder.parent / "cache")
    loot = [
        path
        for path in {*folder.rglob("*")} - before
        if path.is_file()
        and path.read_bytes() == LOOT
        and not any(path.is_relative_to(at) for at in known)
    ]
    wrong = unless(
        nothing_is_written_outside=not loot and not Path(OUT[2]).exists(),
        it_says_why="cannot be used" in run.words_said or "not used" in run.words_said,
        there_is_no_traceback=CRASH not in run.words_said,
    )
    return Outcome(happened=f"exit code {code}, nothing written outside", wrong=wrong)


def names_of_nodes(folder: Path) -> Outcome:
    """Use hostile names in a cluster file, and in handshakes with a controller."""
    codes = []
    for number, name in enumerate(("..", "a\\u0000b", "a" * 300)):
        run = run_in(folder, number)
        words = run.words(*EMBEDDED)
        file = Path(words[words.index("--cluster") + 1])
        file.write_text(TWO_NODES.replace('"right"', f'"{name}"'))
        codes.append(_refused(words))
    called = hostile_names(folder)
    wrong = unless(files_are_refused=codes == [REFUSED] * 3)
    happened = f"exit codes {codes}; of callers {called.happened}"
    return Outcome(happened=happened, wrong=(*wrong, *called.wrong))


def _refused(words: list[str]) -> int | None:
    """Run a command that should be refused at once; return its exit code."""
    from hetjax.train import main

    try:
        return main(words)
    except SystemExit as left:
        return int(left.code or 0)


def numbers_out_of_range(folder: Path) -> Outcome:
    run = run_in(folder)
    words = run.words(*EMBEDDED)
    plan = Path(words[words.index("--plan") + 1])
    cluster = Path(words[words.index("--cluster") + 1])
    first, second = TWO_REPLICAS.replicas
    many: Replica = replace(first, num_microbatches=10**12)
    write_plan(plan, replace(TWO_REPLICAS, replicas=(many, second)))
    codes = [_refused(words)]
    write_plan(plan, TWO_REPLICAS)
    link = '[[link]]\nbetween = ["left", "right"]\nbandwidth_gbit_per_s = 1e-300\n'
    cluster.write_text(f"{TWO_NODES}{link}latency_ms = 1.0\n")
    codes.append(_refused(words))
    wrong = unless(both_are_refused=codes == [REFUSED] * 2)
    return Outcome(happened=f"exit codes {codes}", wrong=wrong)


def two_on_one_directory(folder: Path) -> Outcome:
    """Call as another start of a worker; then start a second controller."""
    called, wrong_called = second_caller(folder)
    run = run_in(folder)
    run.attack("hang-Train")
    with run.going(*EMBEDDED) as first:
        run.wait_until(first, lambda: not (run.attacks / "hang-Train").exists())
        code = run.ended(*EMBEDDED)
        is_there = first.poll() is None
    after = run.ended(*EMBEDDED)
    wrong = unless(
        the_second_controller_is_refused=code == REFUSED,
        it_says_why="is in use by" in run.words_said,
        the_first_goes_on=is_there,
        a_start_after_the_first_died_goes_on=after == DONE,
        the_losses_are_those_of_an_unharmed_run=_same(run, folder),
    )
    happened = f"{called}; exit code {code} beside it, {after} after it was killed"
    return Outcome(happened=happened, wrong=(*wrong_called, *wrong))


@contextmanager
def deaf() -> Iterator[str]:
    """Yield the address of a server that accepts connections and never answers."""
    listener, callers = socket.create_server(("127.0.0.1", 0)), list[socket.socket]()

    def accept() -> None:
        with suppress(OSError):
            while True:
                callers.append(listener.accept()[0])

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for found in (*callers, listener):
            with suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)
            found.close()


def store_without_answers(folder: Path) -> Outcome:
    run = run_in(folder)
    with deaf() as address:
        env = {"STORAGE_EMULATOR_HOST": address, CALL_S: str(_ANSWER_S)}
        code = run.ended(*EMBEDDED, "--checkpoint.cloud", "gs://bucket/run", env=env)
    says_so = f"no answer within {_ANSWER_S:g} s" in run.words_said
    wrong = unless(
        it_ends=code not in (DONE, STOPPED),
        it_says_so=says_so,
        there_is_no_traceback=CRASH not in run.words_said,
    )
    return Outcome(happened=f"exit code {code}, told: {says_so}", wrong=wrong)


def flipped_newest_step(folder: Path) -> Outcome:
    run = run_in(folder)
    first = run.ended(*EMBEDDED, "--stop-after", "4")
    steps = sorted((run.run_dir / CHECKPOINTS).glob("**/step_*"))
    newest = max(steps, key=lambda path: path.name)
    files = [path for path in newest.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    code = run.ended(*EMBEDDED)
    (restored,) = run.events("restored")
    wrong = unless(
        it_ended_with_its_state_saved=first == STOPPED,
        the_next_start_goes_on=code == DONE,
        from_the_step_before=restored["step"] == 2,
        and_says_so=bool(restored.get("passed_over")),
        the_losses_are_those_of_an_unharmed_run=_same(run, folder),
    )
    return Outcome(happened=f"goes on from step {restored['step']}", wrong=wrong)


def full_disk(folder: Path) -> Outcome:
    run = run_in(folder)
    metrics = run.run_dir / METRICS
    never = ("--checkpoint.every", "0")
    with run.going(*EMBEDDED, *never) as victim:
        run.wait_until(victim, lambda: metrics.exists() and len(run.trained) >= 2)
        limit = metrics.stat().st_size + _ROOM_BYTES
        _, most = resource.prlimit(victim.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (limit, most))
        code = victim.wait()
    lines = metrics.read_bytes()
    after = run.ended(*EMBEDDED, *never)
    wrong = unless(
        it_ends_with_code_1=code == 1,
        it_says_what_to_do="make room" in run.words_said,
        there_is_no_traceback=CRASH not in run.words_said,
        its_lines_are_whole=lines.endswith(b"\n")
        and all(map(json.loads, _lines(lines))),
        with_room_it_goes_on=after == DONE,
        the_losses_are_those_of_an_unharmed_run=_same(run, folder),
    )
    happened = f"exit code {code} with {len(_lines(lines))} whole lines, then {after}"
    return Outcome(happened=happened, wrong=wrong)


def _lines(text: bytes) -> list[bytes]:
    return text.split(b"\n")[:-1]


def clock_set_back(folder: Path) -> Outcome:
    """Set the clock back a year for the second of three starts."""
    run, shifted = run_in(folder), folder / "shifted"
    shifted.mkdir()
    (shifted / "sitecustomize.py").write_text(
        "import time\n"
        "_time, _time_ns = time.time, time.time_ns\n"
        f"time.time = lambda: _time() - {_YEAR_S}\n"
        f"time.time_ns = lambda: _time_ns() - {_YEAR_S} * 10**9\n"
    )
    codes = [run.ended(*EMBEDDED, "--stop-after", "2")]
    back = {"PYTHONPATH": str(shifted)}
    codes.append(run.ended(*EMBEDDED, "--stop-after", "2", env=back))
    codes.append(run.ended(*EMBEDDED))
    found = [event["step"] for event in run.events("restored")]
    wrong = unless(
        all_end_as_they_should=codes == [STOPPED, STOPPED, DONE],
        each_goes_on_from_the_newest=found == [2, 4],
        the_losses_are_those_of_an_unharmed_run=_same(run, folder),
    )
    return Outcome(happened=f"starts go on from steps {found}", wrong=wrong)


def bad_weight(folder: Path) -> Outcome:
    run, bad = run_in(folder), STEPS - 1
    run.attack(f"poison-{bad}")
    code = run.ended(*EMBEDDED)
    back = [event["step"] for event in run.events("recovered")]
    wrong = unless(
        it_goes_on=code == DONE,
        it_goes_back_once=len(back) == 1 and back[0] < bad,
        the_losses_are_those_of_an_unharmed_run=_same(run, folder),
    )
    return Outcome(happened=f"back to steps {back}, exit code {code}", wrong=wrong)


def flipped_bit(folder: Path) -> Outcome:
    run, step, every = run_in(folder), 3, 2
    run.attack(f"flip-{step}")
    code = run.ended(*EMBEDDED, "--digest-every", str(every))
    found = [event["step"] for event in run.events("disagreed")]
    wrong = unless(
        it_goes_on=code == DONE,
        it_is_found_in_time=len(found) == 1 and step <= found[0] < step + every,
        the_losses_are_those_of_an_unharmed_run=_same(run, folder),
    )
    return Outcome(happened=f"found after steps {found}, exit code {code}", wrong=wrong)


READING = (
    Attack(
        finding="F1",
        done="a store's manifest names ../ and absolute paths, with right checksums",
        expected="nothing is written outside the run directory, and it says so",
        act=store_that_leads_out,
    ),
    Attack(
        finding="F2",
        done="nodes are called .., a\\0b and a * 300; callers of a controller, too",
        expected="files are refused with exit code 2, callers are turned away",
        act=names_of_nodes,
    ),
    Attack(
        finding="F5",
        done="another start of a worker calls; another controller takes the directory",
        expected="the newer start counts; the second controller has exit code 2",
        act=two_on_one_directory,
    ),
    Attack(
        finding="F6",
        done="a weight turns infinite after an update",
        expected="no checkpoint has it; back to the newest, and the same losses",
        act=bad_weight,
    ),
    Attack(
        finding="F7",
        done="a bit flips in the weights of one of two replicas, --digest-every 2",
        expected="found within 2 steps, and the same losses",
        act=flipped_bit,
    ),
    Attack(
        finding="F11",
        done="a store takes connections and never answers (5 s for a call)",
        expected="the start ends and says so",
        act=store_without_answers,
    ),
    Attack(
        finding="F12",
        done="a bit flips in the newest of two checkpoints",
        expected="the run goes on from the one before, and the same losses",
        act=flipped_newest_step,
    ),
    Attack(
        finding="F13",
        done="no room for metrics.jsonl (a limit on the size of files)",
        expected="exit code 1 with advice, whole lines; with room the same losses",
        act=full_disk,
    ),
    Attack(
        finding="F14",
        done="a plan of 10^12 microbatches, a link of 1e-300 Gbit/s",
        expected="exit code 2",
        act=numbers_out_of_range,
    ),
    Attack(
        finding="F17",
        done="the clock is a year back for the second of three starts",
        expected="each goes on from the newest checkpoint, and the same losses",
        act=clock_set_back,
    ),
)
