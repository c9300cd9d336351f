# SPDX-License-Identifier: Apache-2.0
"""Compares our memory of stages with the figures of three backends' compilers.

    python -m experiments.compiled_memory --output FILE --backend gpu [--limit N]
    python -m experiments.compiled_memory --output FILE --backend gpu --draw SEED
    python -m experiments.compiled_memory --judge FILE [FILE ...] --report REPORT
    python -m experiments.compiled_memory --shares FILE [FILE ...]
    python -m experiments.compiled_memory --table REPORT

The first command compiles stages for devices that need not be here (as
`experiments.compile`) and appends a line of JSON for each; it skips stages that the
file has. The stages are a pairwise covering of all choices. With a seed they are drawn
at random, so that a model can be compared with stages that were not used to make it.
The third command evaluates the model anew for every line and fits one margin per
backend, leaving out one kind of device at a time. Its report also has the errors of
each file. The fourth prints what compilers needed as shares of the estimated workspaces
(`shares.py`), as JSON. The last command prints the report as Markdown.

A total is what lives through the step, as many microbatches in flight as 1F1B has, and
the workspace; only the workspace is estimated. Fitted margins are copied into
`hetjax/costs/workspace.py` by hand.
"""

import argparse
import json
from functools import partial
from pathlib import Path

from experiments.compile.targets import TARGETS
from experiments.compiled_memory import shares
from experiments.compiled_memory.cells import HOST, backend_of, cells_of, drawn
from experiments.compiled_memory.compiling import available, rows_of, run
from experiments.compiled_memory.judging import markdown, report


def main() -> None:
    """Compile, judge or print."""
    parser = argparse.ArgumentParser(description="Hold memory against compilers")
    parser.add_argument("--output", type=Path, help="rows are appended to this file")
    parser.add_argument("--backend", choices=("cpu", "gpu", "tpu"), default="cpu")
    parser.add_argument("--targets", nargs="+", default=[HOST, *TARGETS])
    parser.add_argument("--draw", type=int, help="seed of random cells, no covering")
    parser.add_argument("--limit", type=int, default=60, help="cells of the backend")
    parser.add_argument("--judge", type=Path, nargs="+", help="rows of these files")
    parser.add_argument("--report", type=Path, help="what was judged goes here")
    parser.add_argument("--table", type=Path, help="print this report as Markdown")
    parser.add_argument("--shares", type=Path, nargs="+", help="rows of these files")
    given = parser.parse_args()
    if given.table:
        print(markdown(json.loads(given.table.read_text(encoding="utf-8"))))
    elif given.judge:
        files = {path.stem: rows_of(path) for path in given.judge}
        text = json.dumps(report(files), indent=1)
        given.report.write_text(text + "\n", encoding="utf-8")
    elif given.shares:
        files = {path.stem: rows_of(path) for path in given.shares}
        print(json.dumps(shares.report(files), indent=1))
    elif given.output:
        own = [t for t in given.targets if backend_of(t) == given.backend]
        here = list(filter(available, own))
        cells = cells_of if given.draw is None else partial(drawn, seed=given.draw)
        run(given.output, cells(given.backend)[: given.limit], here)
    else:
        parser.error("give --output, --judge, --shares or --table")


if __name__ == "__main__":
    main()
