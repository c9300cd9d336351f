# SPDX-License-Identifier: Apache-2.0
"""The command `export`: writes a run's weights for transformers.

Owns its options and messages. Does not own the export (`hetjax/api/exporting.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hetjax.cli.command import main_of
from hetjax.cli.options.options import parse_options
from hetjax.errors import BadInput
from hetjax.report.progress import working

_PROGRAM = "python -m hetjax.export"
_HELP = "Write a run's weights as a folder that transformers loads."


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """Which run to export, and where to."""

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """Directory of the run."""
    to: Path | None = None
    """Folder to write; it must be empty, or not exist yet."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of the weights. None: float32 for adapters, otherwise that of the
    initial model's folder, or float32 without one."""
    step: int | Literal["best"] | None = None
    """Step of the checkpoint. None: the newest; best: the one with the lowest
    validation loss."""
    merged: bool = False
    """For a run with adapters: write the whole model, with the adapters merged into its
    weights. Without this option only the adapters are written, for PEFT."""
    base: Path | None = None
    """For a run with adapters: also write the weights under them to this folder,
    rounded as the run held them (--lora.frozen); the adapters name it as their base."""
    ema: bool = False
    """Write the averages of the weights, of a run with --optimizer.ema."""


def export(arguments: Sequence[str]) -> None:
    """Export as the arguments say, and print the result."""
    if not arguments:
        raise BadInput(
            got="no RUN_DIR",
            allowed=f"{_PROGRAM} RUN_DIR --to FOLDER",
            fix=f"{_PROGRAM} runs/tiny --to exported, say",
        )
    default = ExportOptions(run_dir=tyro.MISSING)
    options = parse_options(
        default,
        arguments,
        program=_PROGRAM,
        description=_HELP,
        markers=(tyro.conf.FlagCreatePairsOff,),
    )
    if options.to is None:
        raise BadInput(
            got="no folder to write",
            allowed=f"{_PROGRAM} RUN_DIR --to FOLDER",
            fix="add --to exported, say",
        )
    with working("starting"):  # JAX takes seconds to import
        from hetjax.api.exporting import export_model
    with working("writing"):
        done = export_model(
            options.run_dir,
            options.to,
            dtype=options.dtype,
            step=options.step,
            merged=options.merged,
            base=options.base,
            ema=options.ema,
        )
    what = "adapters of step" if done.what == "adapters" else "step"
    if options.base is not None:
        print(f"wrote {options.base}: the weights under the adapters")
    print(f"wrote {done.folder}: {what} {done.step} in {done.dtype}")


main = main_of(export)
