# SPDX-License-Identifier: Apache-2.0
"""Trains by methods for cards that are too small or too old, ten steps of each.

The methods are LoRA, QLoRA, updates on the host, float16 with a scaled loss, and packed
sequences. Measures step time and peak memory, beside the product's predictions. Then
stops and resumes a run of the command `train` (`experiments/gpu/models/resumed.py`).

A process has only one peak of memory, so all methods run in this process in the order
of their predicted memory: each peak above the previous one belongs to its method.
Owns the methods and their rows. Does not own the stage (`one_stage.py`).
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import median

import jax
import optax

from experiments.gpu.models.one_stage import (
    CLIP_NORM,
    KEY,
    NODE,
    OneStage,
    node_of,
    one_stage,
)
from experiments.gpu.models.random_weights import random_weights
from experiments.gpu.models.resumed import stopped_and_resumed
from experiments.gpu.models.way import peak_bytes
from experiments.gpu.rows import Row, without_names
from experiments.gpu.setting import Setting
from hetjax.cluster.cluster import Node
from hetjax.errors import NoFeasiblePlan
from hetjax.models.finetuning import WITHOUT_ADAPTERS, LoraConfig
from hetjax.models.presets import model_config
from hetjax.plans.plan import Offload
from hetjax.plans.precision import Dtype
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.schedule.predicted import Predicted

_STEPS = 10
_MOST_S = 6.0  # for all steps of a method: an update on the host may take seconds
_EACH_S = 15.0  # for a method: compilation, weights, steps
_LEAST_S = 4.0  # with less time left, no method starts
_RANK = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    name: str
    lora: LoraConfig = WITHOUT_ADAPTERS
    offload: Offload = "none"
    dtype: Dtype = "best"
    packed: bool = False

    def stage(self, setting: Setting, node: Node) -> OneStage:
        config = model_config(setting.choose("llama-1b", "tiny"))
        return one_stage(
            replace(config, max_seq_len=setting.choose(2_048, 32)),
            node,
            microbatches=setting.choose(4, 2),
            size=1,
            dtype=self.dtype,
            lora=self.lora,
            offload=self.offload,
            packed=self.packed,
        )


METHODS = (  # the most valuable first
    Method(name="QLoRA (NF4)", lora=LoraConfig(rank=_RANK, frozen="nf4")),
    Method(name="LoRA", lora=LoraConfig(rank=_RANK)),
    Method(name="optimizer on the host", offload="optimizer"),
    Method(name="float16 with loss scaling", dtype="float16"),
    Method(name="packed sequences", packed=True),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    """A method's stage, its prediction, and its runtime."""

    name: str
    stage: OneStage
    predicted: Predicted
    runtime: StageRuntime

    @property
    def predicted_bytes(self) -> int:
        return self.predicted.memory[f"{NODE}/0"].total_bytes

    @property
    def note(self) -> str:
        stage, plan = self.stage, self.stage.plan
        computed = f"{stage.precision}, attention {stage.stage.attention}"
        sizes = f"{plan.global_batch} x {plan.seq_len}"
        return f"{stage.model.name}, {sizes}, {computed}, remat {stage.stage.remat}"


def measure(setting: Setting) -> Iterator[Row]:
    node, prepared = node_of(setting.device), list[_Prepared]()
    affordable = setting.left_s() / setting.choose(_EACH_S, _EACH_S / 3)
    number = max(1, int(min(affordable, len(METHODS))))
    for method in METHODS[number:]:
        yield Row(what=_runs(method.name), measured=None, note="no time was left")
    for method in METHODS[:number]:
        try:
            prepared.append(_prepared(method, setting, node))
        except NoFeasiblePlan as refused:
            yield Row(what=_step(method.name), measured=None, note=str(refused))
    prepared.sort(key=lambda method: method.predicted_bytes)
    begin_s = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        compiled = [pool.submit(method.runtime.compile) for method in prepared]
    what = "compiling all methods at once"
    yield Row(what=what, measured=time.perf_counter() - begin_s, unit="s")
    for method, compiling in zip(prepared, compiled, strict=True):
        if setting.left_s() > _LEAST_S:
            yield from _tried(method, compiling, setting.device)
    yield from stopped_and_resumed(setting)


def _prepared(method: Method, setting: Setting, node: Node) -> _Prepared:
    stage, optimizer = method.stage(setting, node), optax.adamw(1e-4)
    return _Prepared(
        name=method.name,
        stage=stage,
        predicted=stage.predicted(optimizer),
        runtime=stage.runtime(
            setting.device, optimizer, clip_norm=CLIP_NORM, weights=random_weights()
        ),
    )


def _tried(
    method: _Prepared, compiling: Future[None], device: jax.Device
) -> Iterator[Row]:
    """Yield the method's rows and whether it ran; a failure does not stop others."""
    runs, note = True, ""
    try:
        compiling.result()
        yield from _trained(method, device)
    except Exception as failed:
        runs, note = False, without_names(f"{type(failed).__name__}: {failed}")
    method.runtime.close()
    yield Row(what=_runs(method.name), measured=runs, note=note)


def _trained(method: _Prepared, device: jax.Device) -> Iterator[Row]:
    before_bytes, begin_s = peak_bytes(device), time.perf_counter()
    method.runtime.initialise(0)
    yield Row(
        what=f"{method.name}: time to the first step",
        measured=time.perf_counter() - begin_s,
        unit="s",
        note="weights to the device, quantised if they are held so",
    )
    times_s, skipped = _steps(method)
    yield Row(
        what=_step(method.name),
        measured=median(times_s),
        unit="s",
        predicted=method.predicted.simulation.step_time_s,
        note=f"{method.note}; median of {len(times_s)}",
    )
    what = f"{method.name}: steps that were skipped"
    yield Row(what=what, measured=skipped, note=f"of {len(times_s) + 1}")
    peak, note = peak_bytes(device), ""
    if peak is None:
        note = "the device does not tell"
    elif peak == before_bytes:
        peak, note = None, f"no more than the {peak} bytes that were taken before"
    yield Row(
        what=f"{method.name}: peak memory",
        measured=peak,
        unit="bytes",
        predicted=method.predicted_bytes,
        note=note,
    )


def _steps(method: _Prepared) -> tuple[list[float], int]:
    """Return the seconds of each step after the first, and how many were skipped."""
    runtime, batch, times_s, skipped = method.runtime, method.stage.batch(), [], 0
    while len(times_s) <= _STEPS and sum(times_s[1:]) < _MOST_S:
        begin_s = time.perf_counter()
        scale = method.stage.loss_scale
        commit = runtime.step(len(times_s), batch, loss_scale=scale)
        jax.block_until_ready(runtime.stages[KEY].params)
        times_s.append(time.perf_counter() - begin_s)
        skipped += commit.is_skipped
    return times_s[1:], skipped


def _runs(name: str) -> str:
    return f"{name}: runs"


def _step(name: str) -> str:
    return f"{name}: step"
