# SPDX-License-Identifier: Apache-2.0
"""`python -m experiments.attacks`: repeats the findings of the notes on today's code.

    python -m experiments.attacks [--only F3 F8] [--output FILE] [--folder FOLDER]

Prints a line of JSON for each finding: the attack, what was expected, what happened,
and what was wrong. With `--output` it also appends the lines to the file, and skips
findings that the file has. With `--folder` the runs stay there for inspection, and
another call reuses their compiled programs. Exit code 1 if something is wrong.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.attacks.attack import Attack, Outcome
from experiments.attacks.on_files import READING
from experiments.attacks.on_wire import LISTENING
from experiments.attacks.on_workers import WORKING

ATTACKS: dict[str, Attack] = {
    attack.finding: attack
    for attack in sorted(
        (*READING, *LISTENING, *WORKING), key=lambda found: int(found.finding[1:])
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.attacks")
    parser.add_argument(
        "--only", nargs="*", choices=ATTACKS, default=[*ATTACKS], metavar="FINDING"
    )
    parser.add_argument("--output", type=Path, help="a line of JSON per finding")
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    options = parser.parse_args(arguments)
    # an interrupted attack ends its processes, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    known = {row["finding"] for row in rows_of(options.output)}
    is_wrong = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        for finding in [found for found in options.only if found not in known]:
            row = attacked(ATTACKS[finding], folder / finding)
            print(json.dumps(row), flush=True)
            is_wrong |= not row["ok"]
            if options.output is not None:
                with options.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return int(is_wrong)


def attacked(attack: Attack, folder: Path) -> dict[str, Any]:
    """Run an attack; one that could not be run is wrong, too."""
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier try
    folder.mkdir(parents=True)
    begin_s, commit = time.monotonic(), _commit()
    try:
        outcome = attack.act(folder)
    except Exception as error:
        traceback.print_exc()
        name = type(error).__name__
        outcome = Outcome(happened="it was not done to its end", wrong=(name,))
    return {
        "finding": attack.finding,
        "done": attack.done,
        "expected": attack.expected,
        **asdict(outcome),
        "ok": not outcome.wrong,
        "took_s": round(time.monotonic() - begin_s, 1),
        "load": round(os.getloadavg()[0], 1),
        "commit": commit,
    }


def rows_of(output: Path | None) -> list[dict[str, Any]]:
    if output is None or not output.exists():
        return []
    return [json.loads(line) for line in output.read_text().splitlines()]


def _commit() -> str:
    words = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    return found.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
