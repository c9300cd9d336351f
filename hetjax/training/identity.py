# SPDX-License-Identifier: Apache-2.0
"""What stays the same in a run, whoever goes on with it and wherever.

Owns which settings that is, and refusing a checkpoint of another run. Does not own the
run directory's own record of them (`rundir.py`) nor arrays (`checkpoint/reader.py`).
"""

from collections.abc import Mapping
from typing import Any

from hetjax.data.dataset import Dataset
from hetjax.errors import BadInput
from hetjax.training.config import RunConfig
from hetjax.training.config_files import flat_values

KEPT = ("model", "seed", "seq_len", "global_batch", "optimizer.name")


def identity(config: RunConfig, dataset: Dataset) -> dict[str, Any]:
    """The settings by name, and the hashes of text and tokenizer by file name."""
    values = flat_values(config)
    return {name: values[name] for name in KEPT} | dict(dataset.hashes)


def check_identity(
    found: Mapping[str, Any], own: Mapping[str, Any], step: int, where: str
) -> None:
    """Raise BadInput if what a checkpoint has of its run is not this run's own."""
    unlike = [name for name in own if name in found and found[name] != own[name]]
    if not unlike:
        return
    shown = ", ".join(f"{n} = {found[n]} (here {own[n]})" for n in unlike)
    raise BadInput(
        got=f"step {step} in {where} is of another run: {shown}",
        allowed="checkpoints of one run: the same settings, text and tokenizer "
        f"({', '.join(own)})",
        fix="go on with that run's settings and data, or give folders and stores of "
        "its own to this one (--run-dir, --checkpoint.local, --checkpoint.cloud)",
    )
