# SPDX-License-Identifier: Apache-2.0
"""Measures tokens per second through hetjax, beside one plain jit and beside PyTorch.

All train the same sizes in the same precision, with the remat that the product predicts
to be fastest. Two ways take turns on the card if it holds both at once; otherwise one
runs after the other.

Owns the order and the rows. Does not own the ways (`experiments/gpu/models/way.py`).
"""

import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import get_args

import optax

from experiments.gpu.models.one_stage import NODE, OneStage, node_of
from experiments.gpu.models.way import Task, Way, WayFailed
from experiments.gpu.rows import Row
from experiments.gpu.setting import Setting
from hetjax.cluster.catalogue import device_spec
from hetjax.costs.graph.flops import forward_flops
from hetjax.errors import NoFeasiblePlan
from hetjax.plans.plan import Remat
from hetjax.plans.precision import node_precision
from hetjax.schedule.predicted import Predicted

_NAMES = {"product": "hetjax", "jit": "one plain jit", "torch": "PyTorch"}
_ROUNDS, _STEPS = 3, 3
_ENOUGH_S = 45.0  # the time left that another model needs
_SHARE = 0.9  # of the memory, for ways that share a card, by prediction


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """The task that all ways train, and the product's prediction for it."""

    task: Task
    stage: OneStage
    predicted: Predicted
    fit: float  # how many such stages the card holds at once
    suffix: str  # of each row's name, which separates the second model from the first

    @property
    def note(self) -> str:
        task, stage = self.task, self.stage
        sizes = f"{task.microbatches} x {task.size} x {task.seq_len}"
        computed = f"{task.precision}, attention {stage.stage.attention}"
        return f"{task.model}, {sizes}, {computed}, remat {task.remat}"


def measure(setting: Setting) -> Iterator[Row]:
    models = setting.choose(("llama-1b", "gpt2-124m"), ("tiny",))
    for model, suffix in zip(models, ("", ", second model"), strict=False):
        if not suffix or setting.left_s() > _ENOUGH_S:
            compared = _fastest(setting, model, suffix)
            yield Row(what=f"fits{suffix}", measured=compared is not None, note=model)
            if compared is not None:
                yield from _compare(setting, compared)


def _compare(setting: Setting, compared: Compared) -> Iterator[Row]:
    """Time the product and a plain jit in turns, then the product and PyTorch.

    PyTorch compiles meanwhile if the card has room for a third way.
    """
    task, suffix = compared.task, compared.suffix
    others = ["jit", "torch"] if has_torch() else ["jit"]
    if len(others) == 1:
        what = f"runs, {_NAMES['torch']}{suffix}"
        yield Row(what=what, measured=None, note="PyTorch or transformers is missing")
    product = Way("product", task)
    waiting = {o: Way(o, task) for o in others if compared.fit >= 1 + len(others)}
    product.ready()
    alone_s = product.steps_s(setting.choose(_STEPS, 1))
    for at, other in enumerate(others):
        try:
            way = waiting.pop(other, None) or _started(other, compared, product)
            way.ready()
        except WayFailed as failed:
            what = f"runs, {_NAMES[other]}{suffix}"
            yield Row(what=what, measured=False, note=str(failed))
            continue
        turns_s, theirs_s = _turns(setting, product, way)
        ours_s = turns_s or alone_s
        if at == 0:
            yield from _rows(compared, "product", ours_s)
        yield from _rows(compared, other, theirs_s)
        what = f"rate of hetjax over {_NAMES[other]}{suffix}"
        ratio = median(theirs_s) / median(ours_s)
        yield Row(what=what, measured=ratio, note=compared.note)
        yield _peak(compared, way)
    yield _peak(compared, product)


def _started(name: str, compared: Compared, product: Way) -> Way:
    """Start another way. If only one fits on the card, end the product first."""
    if compared.fit < 2:
        product.end()
    return Way(name, compared.task)


def _turns(
    setting: Setting, product: Way, other: Way
) -> tuple[list[float], list[float]]:
    """Return step seconds of both; none of the product if it has ended."""
    steps = setting.choose(_STEPS, 1)
    ours_s, theirs_s = list[float](), list[float]()
    for _ in range(_ROUNDS):
        ours_s += [] if product.has_ended else product.steps_s(steps)
        theirs_s += other.steps_s(steps)
    return ours_s, theirs_s


def _rows(compared: Compared, way: str, steps_s: list[float]) -> Iterator[Row]:
    plan, step_s = compared.stage.plan, median(steps_s)
    name = f"{_NAMES[way]}{compared.suffix}"
    simulated = compared.predicted.simulation
    yield Row(
        what=f"step, {name}",
        measured=step_s,
        unit="s",
        predicted=simulated.step_time_s if way == "product" else None,
        note=compared.note,
    )
    rate = plan.tokens_per_step / step_s
    yield Row(what=f"rate, {name}", measured=rate, unit="tokens/s")
    flops = 3 * sum(forward_flops(compared.stage.model, plan.seq_len))
    peak_flops = device_spec(compared.stage.node).peak_tflops * 1e12
    mfu = flops * plan.global_batch / step_s / peak_flops
    yield Row(what=f"model FLOP utilization, {name}", measured=mfu)


def _peak(compared: Compared, way: Way) -> Row:
    """End the way, and report its peak memory, which is known only then."""
    predicted = compared.predicted.memory[f"{NODE}/0"].total_bytes
    return Row(
        what=f"peak memory, {_NAMES[way.name]}{compared.suffix}",
        measured=way.end(),
        unit="bytes",
        predicted=predicted if way.name == "product" else None,
    )


def _fastest(setting: Setting, model: str, suffix: str) -> Compared | None:
    """Return the task whose remat fits with the shortest predicted step; None if none
    fits."""
    device = setting.device
    node = node_of(device)
    usual = Task(
        model=model,
        seq_len=setting.choose(1_024 if model.startswith("gpt2") else 2_048, 32),
        microbatches=setting.choose(8, 2),
        size=setting.choose(2, 1),
        remat="none",
        precision=node_precision(node),
        platform=setting.platform,
    )
    limit = (device.memory_stats() or {}).get("bytes_limit", float("inf"))
    found = []
    for remat in get_args(Remat):
        task = replace(usual, remat=remat)
        with suppress(NoFeasiblePlan):
            stage = task.stage(node)
            predicted = stage.predicted(optax.adamw(1e-4))
            total_bytes = predicted.memory[f"{NODE}/0"].total_bytes
            compared = Compared(
                task=task,
                stage=stage,
                predicted=predicted,
                fit=_SHARE * limit / total_bytes,
                suffix=suffix,
            )
            found.append(compared)
    return min(found, key=lambda c: c.predicted.simulation.step_time_s, default=None)


def has_torch() -> bool:
    """Return whether PyTorch and transformers are installed here."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
