# SPDX-License-Identifier: Apache-2.0
"""Runs a standby worker: `python -m hetjax.launchers.standby_process MODULE`.

Imports the module of workers, which takes most of the time of a start, and waits. The
first line of its standard input names its log. From then on it acts as `python -m
MODULE`, which reads the rest. It touches no device before, and ends with its
controller, which holds the other end. Does not own which worker it may replace
(`warm_standby.py`).
"""

import os
import runpy
import sys
from importlib import import_module


def main() -> None:
    name = sys.argv[1]
    import_module(name)
    log = sys.stdin.readline().rstrip("\n")
    if not log:
        return  # the controller has ended, and never needed this one
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for output in (1, 2):
        os.dup2(file, output)
    os.close(file)
    del sys.modules[name]  # its imports stay loaded
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
