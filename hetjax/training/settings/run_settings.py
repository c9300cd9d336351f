# SPDX-License-Identifier: Apache-2.0
"""Lists which settings tell runs apart, and which never change in a run's life.

Owns these lists, which hold wherever a run is resumed, the check of the settings in
checkpoints, and the form in which a path is kept. Does not own the settings
(`config.py`) nor a run's identity (`identity.py`).
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetjax.errors import BadInput
from hetjax.files.parsing import json_value
from hetjax.files.tables import as_kind
from hetjax.optimizers.table import rule_named
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.values import flat_values

KEPT = ("model", "seed", "seq_len", "global_batch", "optimizer.name")
KEPT += ("optimizer.state_bits", "optimizer.ema")
KEPT += ("data.mixture", "train.only")
KEPT += ("lora.rank", "lora.alpha", "lora.targets", "lora.frozen")
# Settings that may differ from start to start without a message
PASSING = ("run_dir", "cluster", "plan", "planner", "microbatch_size", "profile")
PASSING += ("calibration",)
PASSING += ("launcher", "hosts", "transport", "recovery", "simulate", "stop_after")
PASSING += ("trace",)
PASSING += (
    "max_hours",
    "standby_plans_after_s",
    "timeout_scale",
    "watchdog_factor",
    "watch_speeds",
    "replan",
    "reroute",
)
PASSING += ("join.address", "join.wait_s", "join.token_s")
PASSING += ("data.path", "data.cache_dir", "adopt")
PASSING += ("data.column", "data.format", "data.validation", "data.tokenizer")
# Where things are, on which machines: not what a run computes
_PLACES = ("platform", "tls.cert", "tls.key", "tls.ca", "checkpoint.local")
_PLACES += ("checkpoint.cloud", "checkpoint.endpoint", "checkpoint.key_file")
_PLACES += ("checkpoint.copies",)
_PLACES += ("checkpoint.upload_mbit_per_s",)


def settings_to_compare(config: RunConfig) -> dict[str, Any]:
    """Return all settings that affect what a run computes, by name, as JSON values."""
    passing = (*PASSING, *_PLACES)
    values = {n: v for n, v in flat_values(config).items() if n not in passing}
    return json_value(json.dumps(values), finite=False)


def kept_settings(config: RunConfig) -> dict[str, Any]:
    """Return the compared settings that never change in a run's life."""
    values = settings_to_compare(config)
    return {name: values[name] for name in kept_names(config)}


def kept_names(config: RunConfig) -> tuple[str, ...]:
    """Return the names of settings that never change in a run's life.

    Frozen weights are not saved: each start reads them again, so `init` must stay.
    """
    by_rule = (f"optimizer.{name}" for name in rule_named(config.optimizer.name).kept)
    kept = (*KEPT, *by_rule)
    return kept if saves_all_weights(config) else (*kept, "init")


def with_absolute_init(config: RunConfig) -> RunConfig:
    """Return the settings with an absolute `init`, if that is a folder here, so that it
    means the same in every directory."""
    if config.init is None:
        return config
    folder = Path(config.init).expanduser()
    return replace(config, init=str(folder.absolute())) if folder.is_dir() else config


def saves_all_weights(config: RunConfig) -> bool:
    """Return whether the run trains, and so saves, all weights."""
    return config.train.only is None and not config.lora.rank


def check_identity(
    found: Mapping[str, Any], own: Mapping[str, Any], step: int, where: str
) -> None:
    """Raise BadInput if a checkpoint is of another run.

    `found` has its values besides its state; `own` has the settings and hashes of this
    run's checkpoints.
    """
    found = as_kind(found.get("run", {}), "a table", where=f"run in {where}")
    unlike = [name for name in own if name in found and found[name] != own[name]]
    if not unlike:
        return
    shown = ", ".join(f"{n} = {found[n]} (here {own[n]})" for n in unlike)
    raise BadInput(
        got=f"step {step} in {where} belongs to another run: {shown}",
        allowed="checkpoints of one run: the same settings, text and tokenizer "
        f"({', '.join(own)})",
        fix="resume with that run's settings and data, or give this run folders and a "
        "store of its own (--run-dir, --checkpoint.local, --checkpoint.cloud), or "
        "remove the step_* folders of that run there",
    )
