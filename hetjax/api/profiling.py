# SPDX-License-Identifier: Apache-2.0
"""Measures a model's layers: `measure_profile`.

Owns the public function, and the step that it predicts with and without a profile to
show how much the profile narrows predictions. Does not own the choices
(`training/settings/presets.py`), the measuring (`hetjax/profiling/`) nor the wording.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetjax.api.simulating import simulate_plan
from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.certainty.beliefs import CredibleInterval
from hetjax.costs.measured.layer_profile import Measurement, Profile
from hetjax.errors import BadInput
from hetjax.models.model import Model, tensor_sizes
from hetjax.models.named import load_named
from hetjax.optimizers.optimizer import optimizer
from hetjax.plans.even import even_plan
from hetjax.profiling.config import ProfileConfig
from hetjax.profiling.imported import import_sailor
from hetjax.profiling.measuring import check_choices
from hetjax.profiling.measuring import measure_profile as measured
from hetjax.report.certainty import narrowing_line
from hetjax.report.measured import MeasuredProfile
from hetjax.training.layout.hardware import choose_hardware
from hetjax.training.settings.presets import Preset, profile_config
from hetjax.training.settings.presets import preset as preset_of

_ROOMY_GIB = 2.0**20  # predict a step even if the whole model does not fit


def measure_profile(
    preset: str,
    *,
    output: str | Path = "profile.json",
    sailor: str | Path | None = None,
    device: str | None = None,
    quiet: bool = False,
    **choices: Any,
) -> MeasuredProfile:
    """Time the layers of a preset's model on the devices here, and their links.

    Writes a profile to `output`, for `find_plan` and `simulate_plan`. Times that the
    file already has are kept and not measured again. `choices` are the other fields of
    `ProfileConfig`, such as `microbatch_sizes=(1, 2)`; by default they are what the
    preset's plan needs. `sailor` is a file of Sailor's layer times of the model on one
    kind of `device`; the profile then takes these, and nothing is measured. Progress
    goes to standard output, or to standard error if `quiet`.

    Raises BadInput if something cannot be measured, before it measures anything.

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
            fix="add --sailor FILE; for times measured here, give --cluster",
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
    """Measure a model on the preset's hardware, with the preset's optimizer."""
    check_choices(config, model)
    run = replace(
        preset.config,
        cluster=config.cluster,
        simulate=config.simulate,
        platform=config.platform,
    )
    there, rule = choose_hardware(run, preset), optimizer(run.optimizer, run.steps)
    return measured(config, model, there.cluster, there.devices, rule, quiet=quiet)


def narrowing_lines(profile: Profile, path: Path, model: Model) -> Iterator[str]:
    """Yield a line on how much a profile narrows predictions, for each kind of device
    whose steps can also be predicted without it."""
    for kind in sorted(profile.devices):
        first = next(m for m in profile.measurements if m.device == kind)
        with suppress(BadInput):  # the catalogue does not describe it
            yield narrowing_line(
                kind,
                _interval(first, profile, model, path),
                _interval(first, profile, model, None),
            )


def _interval(
    first: Measurement, profile: Profile, model: Model, file: Path | None
) -> CredibleInterval:
    """Return the interval of a step of one microbatch, on as many devices as `first`
    was timed on."""
    node = Node(
        name="alone", device=first.device, count=first.tensor, memory_gib=_ROOMY_GIB
    )
    cluster = Cluster(name="alone", nodes=(node,))
    plan = even_plan(
        cluster,
        model=model.name,
        num_layers=len(model.layers),
        seq_len=profile.seq_len,
        global_batch=first.microbatch_size,
        microbatch_size=first.microbatch_size,
        tensor=first.tensor,
        tensor_sizes=tensor_sizes(model),
        remat=first.remat,
    )
    step = simulate_plan(
        plan,
        model=model,
        cluster=cluster,
        profile=file,
        calibration="none",
        dtype=profile.dtype,
        quiet=True,
    )
    assert step.certainty is not None
    return step.certainty.interval
