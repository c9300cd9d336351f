# SPDX-License-Identifier: Apache-2.0
"""Defines settings and work of workers that serve a run's model instead of training it.

Owns these settings, the served model (its experts drop no tokens) and the class of
stages. Does not own the devices of a worker (`worker.py`), nor the requests to it
(`hetjax/serving/model_on_plan.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hetjax.data.batches import Batch
from hetjax.models.experts.dropless import unlimited
from hetjax.models.model import Model
from hetjax.optimizers.optimizer import AVERAGES
from hetjax.plans.plan import Plan
from hetjax.plans.plan_files import plan_json
from hetjax.runtime.execution.serving import ServingStages
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.training.run_model import run_model
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.values import config_values

_IN_USE = "in_use"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingWork:
    """One worker's part of a served model; it has no data."""

    runtime: StageRuntime

    def close(self) -> None:
        self.runtime.close()

    def batch(self, step: int) -> Batch:
        raise AssertionError("nothing is trained")

    def validation(self, number: int) -> Batch:
        raise AssertionError("nothing is validated")


def serving_settings(
    config: RunConfig, cluster: str, plan: Plan, *, ema: bool
) -> dict[str, Any]:
    """Return what workers need to know, as JSON values; `cluster` is TOML."""
    return {
        "config": config_values(config),
        "cluster": cluster,
        "plan": plan_json(plan),
        _IN_USE: {"ema": ema},
    }


def is_serving(settings: Mapping[str, Any]) -> bool:
    """Return whether the settings are from `serving_settings`."""
    return _IN_USE in settings


def model_of(settings: Mapping[str, Any], config: RunConfig) -> Model:
    """Return the run's model, as it is trained or served; raises as `run_model`."""
    model = run_model(config)
    if not is_serving(settings):
        return model
    layers = (
        replace(layer, modules=tuple(map(unlimited, layer.modules)))
        for layer in model.layers
    )
    return replace(model, layers=tuple(layers))


def stages_for(settings: Mapping[str, Any]) -> Callable[..., StageRuntime]:
    """Return the function that makes the stages of a worker."""
    if not is_serving(settings):
        return StageRuntime
    if settings[_IN_USE]["ema"]:
        return partial(ServingStages, weights_in=AVERAGES)
    return ServingStages
