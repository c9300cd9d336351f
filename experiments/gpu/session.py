# SPDX-License-Identifier: Apache-2.0
"""Tests on one card, within a time limit, all that hetjax says of cards.

    python -m experiments.gpu.session --budget-s 420 --output DIR
    python -m experiments.gpu.session --output DIR --parts rest
    python -m experiments.gpu.session --output DIR --parts speed memory

The parts (`parts/`) run one after the other, the most valuable first, each in its own
process with its own limit. Each measurement is written to disk at once. A part that
fails, hangs or has no time left does not affect the others. `--parts rest` runs the
parts that are not yet done. At the end, and after each part, DIR has `session.json` and
a page, `session.md`: what was predicted, what was measured, and which claims of the
documentation this proves or breaks.

`--platform cpu --quick` runs every part at the smallest sizes, without a card.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from experiments.gpu.page import page
from experiments.gpu.parts import PARTS, USUAL_S
from experiments.gpu.rows import PartFile, PartResult, without_names
from experiments.gpu.time_box import run_boxed
from experiments.machine import machine

_LEAST_S = 8.0  # with less time left, no part starts
_LAST_S = 3.0  # kept for ending the last part and for the page


class Stopped(BaseException):
    """A signal asks the session to end."""


def run_session(
    names: Sequence[str], output: Path, budget_s: float, options: Sequence[str]
) -> None:
    """Run these parts. `output` records the results, whatever happens."""
    end_s = time.monotonic() + budget_s - _LAST_S
    try:
        for name in names:
            left_s = end_s - time.monotonic()
            limit_s = min(PARTS[name].limit_s * max(1.0, budget_s / USUAL_S), left_s)
            _run(name, output, limit_s, options)
            write_results(output, options)
    finally:
        write_results(output, options)


def _run(name: str, output: Path, limit_s: float, options: Sequence[str]) -> None:
    file = PartFile(output, name)
    file.begin(limit_s)
    if limit_s < _LEAST_S:
        file.end("out of time", 0.0, "the session had no time left for it")
        return
    print(f"{name}: {PARTS[name].title}, {limit_s:.0f} s at most", flush=True)
    command = _command(name, output, limit_s, options)
    log, begin_s = output / "logs" / f"{name}.txt", time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        code = run_boxed(command, limit_s, log)
    except Stopped:
        file.end("stopped", time.monotonic() - begin_s, "the session was stopped")
        raise
    took_s = time.monotonic() - begin_s
    if code is None:
        file.end("out of time", took_s, f"it did not end within {limit_s:.0f} s")
    elif file.read().state == "stopped":  # the part recorded no end
        why = log.read_text(encoding="utf-8", errors="replace")
        file.end("failed", took_s, f"exit code {code}; {without_names(why)}")
    print(f"{name}: {file.read().state} after {took_s:.0f} s", flush=True)


def _command(
    name: str, output: Path, limit_s: float, options: Sequence[str]
) -> list[str]:
    own = ["--output", str(output), "--limit-s", f"{limit_s:.1f}"]
    return [sys.executable, "-m", "experiments.gpu.part", name, *options, *own]


def results(output: Path) -> list[PartResult]:
    """Return what is known of each part, from this and earlier sessions."""
    return [PartFile(output, name).read() for name in PARTS]


def write_results(output: Path, options: Sequence[str]) -> None:
    """Write the session's JSON, with card and date, and its page."""
    found = results(output)
    session = {
        "command": " ".join(("python -m experiments.gpu.session", *options)),
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "card": card_of(found),
        "driver": driver(),
        "parts": [asdict(part) for part in found],
    }
    text = json.dumps(session, indent=1) + "\n"
    (output / "session.json").write_text(text, encoding="utf-8")
    (output / "session.md").write_text(page(session, found), encoding="utf-8")


def card_of(found: Sequence[PartResult]) -> str | None:
    """Return the card's name for itself, which the first part records."""
    rows = (row for part in found for row in part.rows)
    return next((str(row.measured) for row in rows if row.what == "card"), None)


def driver() -> str | None:
    """Return NVIDIA's description of cards and driver; None without a driver."""
    query = "name,memory.total,driver_version,compute_cap,power.limit"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def chosen(asked: Sequence[str], output: Path) -> list[str]:
    """Return the parts to run: all, the named ones, or those not done yet."""
    if [*asked] == ["rest"]:
        done = {part.name for part in results(output) if part.state == "done"}
        return [name for name in PARTS if name not in done]
    return [name for name in PARTS if not asked or name in asked]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--budget-s", type=float, default=USUAL_S)
    made.add_argument("--output", type=Path, required=True, metavar="DIR")
    made.add_argument(
        "--parts", nargs="+", default=[], choices=[*PARTS, "rest"], metavar="PART"
    )
    made.add_argument("--platform", default="cuda")
    made.add_argument("--quick", action="store_true", help="the smallest sizes")
    return made


def _stop(number: int, frame: FrameType | None) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # ending takes a moment
    raise Stopped(signal.Signals(number).name)


def main() -> int:
    arguments = parser().parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    options: list[str] = ["--platform", arguments.platform]
    options += ["--quick"] if arguments.quick else []
    try:
        run_session(
            chosen(arguments.parts, output), output, arguments.budget_s, options
        )
    except Stopped as stopped:
        print(f"stopped by {stopped}; {output / 'session.md'} has what was measured")
        return 130
    print(f"{output / 'session.md'} says what was measured")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
