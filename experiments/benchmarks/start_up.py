# SPDX-License-Identifier: Apache-2.0
"""Measures a run's time to its first step, at the first start and at the next.

    python -m experiments.benchmarks.start_up [--rounds 1] [--of DIR ...]

A first start has neither corpus nor tokenizer nor compiled programs; the second resumes
the same run. Prints a line of JSON for each start: seconds from the command to the end
of each phase, CPU seconds until then, and the machine's load. Several folders `--of`
are checkouts to compare; they take turns.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# the lines of a run's output that end a phase
_ENDS = {
    "data and plan": re.compile(r"model: "),
    "compiled": re.compile(r"compiled (\d+)/\1 programs"),
    "first step": re.compile(r"step +\d+/\d+  loss"),
}


def main() -> None:
    """Measure, and print a line for each start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--of", nargs="+", type=Path, default=[Path.cwd()])
    options = parser.parse_args()
    for number in range(options.rounds):
        for checkout in options.of:
            for found in starts(options.preset, checkout.absolute()):
                print(json.dumps({"round": number, **found}), flush=True)


def starts(preset: str, checkout: Path) -> Iterator[dict[str, object]]:
    """Start a new run, then resume it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-u", "-m", "hetjax.train", preset]
        command += ["--run-dir", f"{folder}/run", "--data.cache-dir", f"{folder}/cache"]
        command += ["--stop-after", "1"]
        for start in ("first", "second"):
            figures = seconds(command, checkout)
            yield {"of": checkout.name, "start": start, **figures}


def seconds(command: list[str], checkout: Path) -> dict[str, object]:
    """Run the command to its end; return when its phases ended."""
    ends: dict[str, object] = {}
    begin_s = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            for phase, pattern in _ENDS.items():
                if phase not in ends and pattern.match(line):
                    wall_s = round(time.monotonic() - begin_s, 2)
                    ends[phase] = {"wall_s": wall_s, "cpu_s": _cpu_s(process.pid)}
    assert process.returncode in (0, 4), process.returncode  # done, or stopped as asked
    return {**ends, "load": round(os.getloadavg()[0], 1), "cores": os.cpu_count()}


def _cpu_s(process: int) -> float:
    """Return CPU seconds of the process and of its children that have ended."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    ticks = sum(map(int, fields[11:15]))  # its own and its children's, see proc(5)
    return round(ticks / os.sysconf("SC_CLK_TCK"), 2)


if __name__ == "__main__":
    main()
