# SPDX-License-Identifier: Apache-2.0
"""Chooses where to compute a trained model: devices of this process, or its run's plan.

Owns the default choice, and the interface that both places share. Does not own how
layers are loaded onto devices (`hetjax/serving/loaded_model.py`), nor the workers of
plans (`hetjax/api/model_on_plan.py`).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import jax
import jax.numpy as jnp

from hetjax.api.model_on_plan import on_plan
from hetjax.api.run_checkpoints import AskedStep
from hetjax.api.trained_sources import TrainedSource
from hetjax.cluster.cluster import Node, Precision
from hetjax.cluster.discovery import device_name
from hetjax.cluster.local_devices import LocalDevice
from hetjax.data.settings import DataConfig
from hetjax.errors import BadInput
from hetjax.files.user_cache import expanded
from hetjax.launchers.device_probe import accelerators_here
from hetjax.mesh.accelerators import check_accelerator_used
from hetjax.mesh.process_setup import keep_compiled
from hetjax.plans.precision import Dtype, node_precision
from hetjax.report.progress import now_and_then
from hetjax.serving.decoding import Continuation, Text
from hetjax.serving.loaded_model import SHARE, LoadedModel, load_layers, model_bytes
from hetjax.serving.model_on_plan import ModelOnPlan
from hetjax.serving.scoring import Scorer, scorer

On = Literal["auto", "plan", "one-device"]
_BATCH = 8  # windows at once on one device, by default


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsChoice:
    """Which weights to use, in which precision, on which platform, and which function
    may be called as the model."""

    step: AskedStep
    ema: bool
    allow_model_code: str | None
    dtype: Dtype
    platform: Literal["auto", "cpu"]


class ServingPlace(Protocol):
    """Where a model is computed; it generates one text at a time."""

    @property
    def dtype(self) -> str: ...

    def scorer(self, batch_size: int | None) -> Scorer: ...

    def new_text(self, num_positions: int) -> Text: ...


@dataclass(frozen=True, slots=True)
class OnDevices:
    """A model whose layers are each whole on one device of this process."""

    loaded: LoadedModel
    dtype: str

    def scorer(self, batch_size: int | None) -> Scorer:
        return scorer(self.loaded, batch_size or _BATCH)

    def new_text(self, num_positions: int) -> Text:
        return Continuation(self.loaded, num_positions)

    def __str__(self) -> str:
        return ", ".join(map(str, self.loaded.devices))


@dataclass(frozen=True, slots=True)
class OnPlan:
    """A model whose layers are where the run's plan puts them."""

    used: ModelOnPlan

    @property
    def dtype(self) -> str:
        found = {stage.precision or "" for _, _, stage in self.used.plan.stages()}
        return ", ".join(sorted(found))

    def scorer(self, batch_size: int | None) -> Scorer:
        if batch_size is not None:
            raise BadInput(
                got=f"--batch-size {batch_size} on the run's plan",
                allowed=f"{self.used.plan.global_batch} windows at once, as many as a "
                "training step has sequences",
                fix="leave --batch-size out, or give --on one-device",
            )
        return self.used.score

    def new_text(self, num_positions: int) -> Text:
        return self.used.new_text(num_positions)

    def __str__(self) -> str:
        return str(self.used)


@contextmanager
def placed(
    source: TrainedSource,
    asked: WeightsChoice,
    on: On,
    report_line: Callable[[str], None],
    doing: Callable[[str], None],
) -> Iterator[ServingPlace]:
    """Make the model ready in the place `on`. If that is "auto", report the choice for
    a run's model to `report_line`.

    Raises BadInput if `on` is "plan" and there is none, or if the model does not fit.
    """
    if on == "auto":
        on, why = _chosen(source, asked)
        if source.run_dir is not None:
            report_line(f"{_WORDS[on]}: {why}")
    if on == "one-device":
        yield _on_devices(source, asked, doing)
        return
    _check_plan_can(source, asked)
    assert source.run_dir is not None
    with on_plan(
        source.run_dir,
        step=asked.step,
        ema=asked.ema,
        allow_model_code=asked.allow_model_code,
        doing=doing,
    ) as used:
        yield OnPlan(used)


_WORDS = {"plan": "on the run's plan", "one-device": "on one device"}


def _chosen(
    source: TrainedSource, asked: WeightsChoice
) -> tuple[Literal["plan", "one-device"], str]:
    """Choose one device if the model does not come from a run, if it fits on the
    largest accelerator here, or if there is no accelerator."""
    if source.run_dir is None:
        return "one-device", "the model is not from a run"
    here = [] if asked.platform == "cpu" else accelerators_here(os.environ)
    if not here:
        return "one-device", "CPU memory is not limited (--on plan: the run's plan)"
    largest = max(here, key=lambda device: device.memory_bytes)
    need = model_bytes(source.model, jnp.dtype(_precision(largest, asked.dtype)))
    fits = need <= SHARE * largest.memory_bytes
    why = (
        f"{need / 2**30:.1f} GiB of weights {'' if fits else 'do not '}fit into "
        f"{SHARE:.0%} of the {largest.memory_bytes / 2**30:.1f} GiB of one "
        f"{largest.device_kind}"
    )
    return ("one-device" if fits else "plan"), why


def _check_plan_can(source: TrainedSource, asked: WeightsChoice) -> None:
    if source.run_dir is None:
        raise BadInput(
            got="--on plan for a model that is not from a run",
            allowed="--on plan with the --run-dir of a run",
            fix="leave --on out",
        )
    for option in ("dtype", "platform"):
        if (value := getattr(asked, option)) not in ("best", "auto"):
            raise BadInput(
                got=f"--{option} {value} on the run's plan",
                allowed="what the run was trained with, on the devices of its plan",
                fix=f"leave --{option} out, or give --on one-device",
            )


def _on_devices(
    source: TrainedSource, asked: WeightsChoice, doing: Callable[[str], None]
) -> OnDevices:
    devices, tell = _devices(asked.platform), now_and_then(doing)
    dtype = _precision(devices[0], asked.dtype)
    keep_compiled(expanded(DataConfig().cache_dir))
    numbers = jnp.dtype(dtype)
    with source.reading(numbers) as read:
        loaded = load_layers(
            source.model,
            read,
            numbers,
            devices,
            loaded=lambda done, of: tell(f"reading layer {done}/{of}"),
        )
    return OnDevices(loaded, dtype)


def _devices(platform: Literal["auto", "cpu"]) -> list[jax.Device]:
    if platform == "cpu":
        return jax.local_devices(backend="cpu")
    check_accelerator_used()
    return jax.local_devices()


def _precision(device: jax.Device | LocalDevice, asked: Dtype) -> Precision:
    return node_precision(Node(name="here", device=device_name(device), count=1), asked)
