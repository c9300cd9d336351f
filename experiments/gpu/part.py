# SPDX-License-Identifier: Apache-2.0
"""Runs one part of a session in this process; a session starts this for each part.

    python -m experiments.gpu.part memory --platform cpu --quick

Prints each row, and writes it to `--output DIR` as a session does. Owns how a
part reports its end: done; skipped or out of time, with the reason; or failed, with the
traceback.
"""

import argparse
import importlib
import os
import signal
import threading
import time
import traceback
from pathlib import Path

from experiments.gpu.parts import PARTS
from experiments.gpu.rows import PartFile
from experiments.gpu.setting import OutOfTime, Setting, Skipped, share_card
from experiments.gpu.time_box import MARK


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("part", choices=PARTS)
    made.add_argument("--platform", default="cuda")
    made.add_argument("--quick", action="store_true", help="the smallest sizes")
    made.add_argument("--limit-s", type=float, help="when its process is ended")
    made.add_argument("--output", type=Path, default=Path("session"))
    return made


def run_part(name: str, file: PartFile, setting: Setting) -> None:
    """Add each row of the part to its file as soon as it is measured. At the end, add
    how the part ended."""
    module = importlib.import_module(f"experiments.gpu.parts.{name}")
    begin_s = time.monotonic()
    state, why = "done", ""
    try:
        for row in module.measure(setting):
            file.add(row)
            print(row, flush=True)
    except Skipped as reason:
        state, why = "skipped", str(reason)
    except OutOfTime as reason:
        state, why = "out of time", str(reason)
    except Exception:
        state, why = "failed", traceback.format_exc()
    file.end(state, time.monotonic() - begin_s, why)


def _end_with_session() -> None:
    """Wait for the end of standard input, then kill this process's group.

    A session holds the input open as long as it lives. Reads the file descriptor:
    Python cannot exit while a thread waits in `sys.stdin`.
    """
    while os.read(0, 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _age_s() -> float:
    """Return the seconds since this process started, its imports included."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2]
    started_s = int(fields.split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def main() -> None:
    arguments = parser().parse_args()
    if MARK in os.environ:
        threading.Thread(target=_end_with_session, daemon=True).start()
    limit_s = arguments.limit_s or PARTS[arguments.part].limit_s
    share_card()
    file = PartFile(arguments.output, arguments.part)
    file.begin(limit_s)
    setting = Setting(
        platform=arguments.platform,
        quick=arguments.quick,
        ends_s=time.monotonic() + limit_s - _age_s(),
        logs=arguments.output / "logs",
    )
    run_part(arguments.part, file, setting)
    ended = file.read()
    print(f"{ended.name}: {ended.state}", ended.why, sep="\n")


if __name__ == "__main__":
    main()
