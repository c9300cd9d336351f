# SPDX-License-Identifier: Apache-2.0
"""Measuring a model's layers: `measure_profile`.

Owns the public function. Does not own the choices (`training/settings/presets.py`) nor
the measuring (`hetjax/profiling/`).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from hetjax.api.narrowing import narrowing_lines
from hetjax.costs.measured.layer_profile import Profile
from hetjax.errors import BadInput
from hetjax.models.model import Model
from hetjax.models.named import load_named
from hetjax.optimizers.optimizer import optimizer
from hetjax.profiling.config import ProfileConfig
from hetjax.profiling.imported import import_sailor
from hetjax.profiling.measuring import check_choices
from hetjax.profiling.measuring import measure_profile as measured
from hetjax.report.measured import MeasuredProfile
from hetjax.training.layout.hardware import choose_hardware
from hetjax.training.settings.presets import Preset, profile_config
from hetjax.training.settings.presets import preset as preset_of


def measure_profile(
    preset: str,
    *,
    output: str | Path = "profile.json",
    sailor: str | Path | None = None,
    device: str | None = None,
    quiet: bool = False,
    **choices: Any,
) -> MeasuredProfile:
    """Time the layers of a preset's model on what is here, and the links between.

    Writes a profile to `output`, which `find_plan` and `simulate_plan` take; what is in
    the file already is kept and not measured again. `choices` are the other fields of
    `ProfileConfig`, such as `microbatch_sizes=(1, 2)`; by default they are what the
    preset's plan needs. With `sailor`, a file of Sailor's layer times of the model on a
    kind of `device`, nothing is measured: these are written. Progress is shown on
    standard output, or on standard error if `quiet`. BadInput if something cannot be
    measured, before anything is.

    >>> measure_profile("tiny", tensor=(3,), output="p.json")
    Traceback (most recent call last):
    ...
    hetjax.errors.BadInput: got: tensor = 3 with 4 heads
    ...
    """
    chosen = preset_of(preset)
    config = replace(profile_config(chosen), output=Path(output), **choices)
    model = load_named(chosen.config.model)
    if sailor is None and device is not None:
        raise BadInput(
            got=f"--device {device} without --sailor",
            allowed="--device for a file of times that were measured elsewhere",
            fix="add --sailor FILE; what is measured here says the --cluster",
        )
    if sailor is None:
        profile = measure_model(config, chosen, model, quiet=quiet)
    else:
        profile = import_sailor(config, model, Path(sailor), device)
    is_real = sailor is not None or not config.simulate
    sure = narrowing_lines(profile, config.output, model) if is_real else ()
    return MeasuredProfile(profile=profile, path=config.output, how_sure=tuple(sure))


def measure_model(
    config: ProfileConfig, preset: Preset, model: Model, *, quiet: bool = False
) -> Profile:
    """The same of a model on the preset's hardware, updated by its optimizer."""
    check_choices(config, model)
    run = replace(
        preset.config,
        cluster=config.cluster,
        simulate=config.simulate,
        platform=config.platform,
    )
    there, rule = choose_hardware(run, preset), optimizer(run.optimizer, run.steps)
    return measured(config, model, there.cluster, there.devices, rule, quiet=quiet)
