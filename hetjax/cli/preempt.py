# SPDX-License-Identifier: Apache-2.0
"""The command `preempt`: asks a run to save and leave.

Owns its options and messages. Does not own the request
(`training/recovery/notice_sources.py`).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hetjax.cli.command import main_of
from hetjax.cli.options.options import parse_options
from hetjax.cluster.cluster_files import read_cluster
from hetjax.errors import BadInput, did_you_mean
from hetjax.training.directory.rundir import CLUSTER, CONFIG, usable
from hetjax.training.recovery.notice_sources import REQUEST, ask_to_leave

_PROGRAM = "python -m hetjax.preempt"
_HELP = "Ask a run to save and stop, with exit code 4, or to continue without a node."


@dataclass(frozen=True, kw_only=True, slots=True)
class PreemptOptions:
    """Which run, and which part of it."""

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """Directory of the run."""
    node: str | None = None
    """Node that the run should release and continue without; None: stop the whole
    run."""


def ask(run_dir: Path, node: str | None) -> str:
    """Write the request; return a message on what happens next."""
    if not os.path.isfile(run_dir / CONFIG):
        raise BadInput(
            got=f"no {CONFIG} in {str(run_dir)!r}",
            allowed="the directory of a run",
            fix="give the --run-dir of the run; presets train in runs/PRESET",
        )
    names = [each.name for each in read_cluster(run_dir / CLUSTER).nodes]
    if node is not None and node not in names:
        raise BadInput(
            got=f"node {node}", allowed=", ".join(names), fix=did_you_mean(node, names)
        )
    again = " (this replaces a pending request)" * (run_dir / REQUEST).exists()
    with usable(run_dir):
        path = ask_to_leave(run_dir, node)
    wish = "to stop" if node is None else f"to release {node}"
    return (
        f"asked the run in {run_dir} {wish} once the current step is done and saved"
        f"{again}\n"
        "if the run is not in progress, its next start obeys; to withdraw the request: "
        f"rm {path}"
    )


def preempt(arguments: Sequence[str]) -> None:
    """Send the request of the arguments; print what happens next."""
    if not arguments:
        raise BadInput(
            got="no RUN_DIR",
            allowed=f"{_PROGRAM} RUN_DIR",
            fix=f"{_PROGRAM} runs/tiny, say",
        )
    default = PreemptOptions(run_dir=tyro.MISSING)
    options = parse_options(default, arguments, program=_PROGRAM, description=_HELP)
    print(ask(options.run_dir, options.node))


main = main_of(preempt)
