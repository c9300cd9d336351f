# SPDX-License-Identifier: Apache-2.0
"""Compares a stage's peak memory: predicted, by the compiler's figures, and measured.

First tests whether a process starts with the share of a GPU's memory that hetjax gives
it, and can hold as many bytes as plans may use. Then trains stages that differ in
model, remat and length, each in its own process, because the peak is counted per
process. This process leaves the card to them. Owns which stages run, and how many at
once. Does not own the processes (`start.py`, `way.py`).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import optax

from experiments.gpu.models.one_stage import OneStage
from experiments.gpu.models.way import Task, Way, WayFailed
from experiments.gpu.processes.start import NotInTime, NotStarted, Started, started
from experiments.gpu.rows import Row
from experiments.gpu.setting import Setting
from hetjax.cluster.catalogue import best_precision, device_spec
from hetjax.cluster.cluster import Node
from hetjax.cluster.memory_budget import GPU_ALLOCATOR_FRACTION, node_plan_bytes
from hetjax.costs.measured.compiled import NOTHING
from hetjax.plans.plan import Remat

STARTS = f"a process starts with {GPU_ALLOCATOR_FRACTION:.0%} of the memory"
FILLED = "a process holds what plans may fill"
HIGHEST = "peak of memory over the prediction, the highest"
LOWEST = "peak of memory over the prediction, the lowest"
_OTHER_SHARE = 0.9
_START_LIMIT_S = 60.0
_STAGE_S = 15.0  # with less time left, no stage starts
_AT_ONCE, _NUM_STAGES = 3, 6
_MICROBATCHES = 2
# names that allocators give to the memory that they keep; the first one present counts
_KEPT = ("peak_pool_bytes", "pool_bytes", "peak_bytes_reserved", "bytes_reserved")
_UNKNOWN = "CPUs tell no peak: this is the compiler's total"

# model, remat, positions, sequences of a microbatch; the first six that fit run
Choice = tuple[str, Remat, int, int]
_USUAL: tuple[Choice, ...] = (
    ("llama-1b", "selective", 4096, 1),
    ("llama-1b", "none", 2048, 1),
    ("gpt2-124m", "none", 1024, 8),
    ("llama-1b", "full", 16384, 1),
    ("qwen3-0.6b", "selective", 8192, 1),
    ("gpt2-124m", "selective", 1024, 4),
    ("smollm2-360m", "none", 2048, 2),  # from here on for cards with less memory
    ("smollm2-135m", "full", 8192, 1),
    ("gpt2-124m", "full", 1024, 2),
    ("smollm2-135m", "selective", 2048, 1),
    ("gpt2-124m", "selective", 512, 1),
)
_QUICK: tuple[Choice, ...] = (("tiny", "selective", 32, 1), ("tiny", "none", 64, 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    """A stage, the task of its process, and the bytes that the model predicts."""

    task: Task
    stage: OneStage
    predicted_bytes: int

    @property
    def name(self) -> str:
        task = self.task
        sizes = f"{task.size} x {task.seq_len:,} positions"
        return f"{task.model}, remat {task.remat}, {sizes}"


def measure(setting: Setting) -> Iterator[Row]:
    jax.config.update("jax_platforms", "cpu")  # this process only predicts
    try:
        first = _started(setting, GPU_ALLOCATOR_FRACTION)
    except NotStarted as why:
        yield _not_started(STARTS, why)
        first = _started(setting, _OTHER_SHARE / 2)
    else:
        yield Row(what=STARTS, measured=True)
        yield from _shared(first, GPU_ALLOCATOR_FRACTION)
    yield from _stages(setting, first.node)
    if setting.left_s() > _STAGE_S:
        yield from _other_share(setting)


def _started(setting: Setting, share: float) -> Started:
    limit_s = min(_START_LIMIT_S, setting.left_s() - 1)
    return started(setting.platform, share, limit_s)


def _not_started(what: str, why: NotStarted) -> Row:
    """Report a process that did not start; one without enough time says nothing."""
    measured = None if isinstance(why, NotInTime) else False
    return Row(what=what, measured=measured, note=str(why))


def _shared(found: Started, share: float) -> Iterator[Row]:
    """Yield the process's memory beside what plans and the driver count on."""
    card_bytes = device_spec(found.node).memory_gib * 2**30
    yield Row(
        what=f"memory of JAX at {share:.0%}",
        measured=found.bytes_limit,
        unit="bytes",
        predicted=share * card_bytes,
    )
    yield Row(
        what="memory that plans may fill, of what JAX has",
        measured=found.bytes_limit and node_plan_bytes(found.node) / found.bytes_limit,
    )
    yield Row(what=FILLED, measured=found.is_filled, note=f"JAX has {share:.0%}")
    if found.bytes_limit and found.used_bytes:
        yield Row(
            what="memory outside of JAX's",
            measured=found.used_bytes - found.bytes_limit,
            unit="bytes",
            predicted=(1 - share) * card_bytes,
            note="by the driver, of all processes; predicted is what is left for it",
        )


def _other_share(setting: Setting) -> Iterator[Row]:
    what = f"a process starts with {_OTHER_SHARE:.0%} of the memory"
    try:
        found = _started(setting, _OTHER_SHARE)
    except NotStarted as why:
        yield _not_started(what, why)
    else:
        yield Row(what=what, measured=True)
        yield next(_shared(found, _OTHER_SHARE))


def _stages(setting: Setting, node: Node) -> Iterator[Row]:
    ratios: list[float] = []
    candidates = islice(_fitting(setting, node), _NUM_STAGES)
    for candidate, way in _running(setting, candidates, node):
        try:
            about = way.ready()
            peak_bytes = way.end()
        except WayFailed as failed:
            yield Row(
                what=f"peak of memory, {candidate.name}",
                measured=None,
                predicted=candidate.predicted_bytes,
                note=str(failed),
            )
            continue
        rows = [*_peaks(candidate, about, peak_bytes, way.memory)]
        ratios += [ratio for row in rows[:1] if (ratio := row.ratio)]
        yield from rows
    if ratios:
        note = f"of {len(ratios)} stages"
        yield Row(what=HIGHEST, measured=max(ratios), predicted=1.0, note=note)
        yield Row(what=LOWEST, measured=min(ratios), predicted=1.0, note=note)


def _peaks(
    candidate: _Candidate,
    about: dict[str, Any],
    peak_bytes: int | None,
    allocator: dict[str, int],
) -> Iterator[Row]:
    stage, optimizer = candidate.stage, optax.adamw(1e-4)
    compiled = stage.compiled(optimizer, about["temp_bytes"])
    by_compiler = stage.memory(optimizer, compiled).total_bytes
    note = _UNKNOWN if peak_bytes is None else ""
    if peak_bytes is not None and about["compiling"] == peak_bytes:
        note = "the peak is of compiling, which tries out kernels: steps take less"
    measured = by_compiler if peak_bytes is None else peak_bytes
    predictions = {"": candidate.predicted_bytes, " once compiled": by_compiler}
    for when, predicted in predictions.items():
        yield Row(
            what=f"peak of memory{when}, {candidate.name}",
            measured=measured,
            unit="bytes",
            predicted=predicted,
            note=note,
        )
    kept = next((allocator[k] for k in _KEPT if allocator.get(k)), None)
    if kept and peak_bytes:
        yield Row(
            what=f"memory that the allocator keeps, {candidate.name}",
            measured=kept,
            unit="bytes",
            predicted=peak_bytes,
            note="predicted is the peak in use; without preallocation",
        )


def _running(
    setting: Setting, candidates: Iterator[_Candidate], node: Node
) -> Iterator[tuple[_Candidate, Way]]:
    """Start candidates while there is room; yield the running ones in their order."""
    running = deque[tuple[_Candidate, Way]]()
    candidate = next(candidates, None)
    while candidate or running:
        while candidate and _has_room(candidate, running, node):
            running.append((candidate, Way("product", candidate.task)))
            late = setting.left_s() < _STAGE_S
            candidate = None if late else next(candidates, None)
        yield running[0]
        running.popleft()


def _has_room(
    candidate: _Candidate, running: Sequence[tuple[_Candidate, Way]], node: Node
) -> bool:
    taken = sum(other.predicted_bytes for other, _ in running)
    fits = taken + candidate.predicted_bytes <= node_plan_bytes(node)
    return len(running) < _AT_ONCE and (fits or not running)


def _fitting(setting: Setting, node: Node) -> Iterator[_Candidate]:
    """Yield the stages that the model predicts to fit."""
    precision = best_precision(device_spec(node))
    for model, remat, seq_len, size in setting.choose(_USUAL, _QUICK):
        task = Task(
            model=model,
            seq_len=seq_len,
            microbatches=_MICROBATCHES,
            size=size,
            remat=remat,
            precision=precision,
            platform=setting.platform,
        )
        stage = task.stage(node)
        predicted = stage.memory(optax.adamw(1e-4), NOTHING).total_bytes
        if predicted <= node_plan_bytes(node):
            yield _Candidate(task=task, stage=stage, predicted_bytes=predicted)
