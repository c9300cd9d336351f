# SPDX-License-Identifier: Apache-2.0
"""One run from its settings to its end: what stands before and after the loop.

Owns the order of set-up (all that the user may have got wrong comes before anything
is written), resuming, and what is said at start and end. Does not own the loop
(`loop.py`) nor the command line (`cli/train_options.py`).
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

from hetjax.data.dataset import Dataset, load, prepare
from hetjax.elastic.notices import Notice, Watch, of_workers
from hetjax.elastic.recovered import Recovered
from hetjax.elastic.stopping import StopRequest
from hetjax.models.counts import parameter_count
from hetjax.models.model import Model
from hetjax.report.progress import Display, display
from hetjax.runtime.control import WorkerLost
from hetjax.training import rundir
from hetjax.training.config import RunConfig, check_config
from hetjax.training.driving import Driver
from hetjax.training.ending import Failed, clear_ends
from hetjax.training.goodput import Goodput, Spent, goodput_line, goodput_values
from hetjax.training.journal import Journal, read_journal
from hetjax.training.loop import Loop
from hetjax.training.optimizer import LearningRates
from hetjax.training.placement import (
    choose_hardware,
    choose_plan,
)
from hetjax.training.presets import Preset
from hetjax.training.reached import check_reached, evaluated, read_progress
from hetjax.training.rundir import LOGS, Previous
from hetjax.training.starting import Start, driver_of
from hetjax.training.utilization import seconds_at_peak

DONE, PREEMPTED = 0, 4  # exit codes
_TOLD_EVERY_S = 0.1
# Settings that may differ from start to start without a word
_PASSING = ("run_dir", "cluster", "plan", "planner", "microbatch_size", "profile")
_PASSING += ("launcher", "transport", "recovery", "simulate", "stop_after", "trace")
_PASSING += ("foresee_after_s", "patience", "data.path", "data.cache_dir")


def run(config: RunConfig, preset: Preset, model: Model) -> int:
    """Train, or go on with the run in `run_dir`; return the exit code 0 or 4.

    `preset` gives the cluster and the plan to fall back on. Raises BadInput before
    anything is written, Failed where training cannot go on.
    """
    begin_s = time.perf_counter()
    check_config(config)
    with (
        clear_ends(config),
        rundir.locked(config.run_dir),
        display(config.steps) as shown,
    ):
        previous = rundir.read_previous(config.run_dir)
        if previous is not None:
            rundir.check_same_run(previous, config)
        for name in (rundir.METRICS, rundir.EVENTS):
            read_journal(config.run_dir / name)  # a damaged one is refused
        progress = read_progress(config, shown)
        shown.doing("looking for devices")
        hardware = choose_hardware(config, preset)
        choice = choose_plan(
            config, model, hardware.cluster, preset, previous, shown.doing
        )
        if progress.is_done:
            shown.note(f"{config.run_dir} has done all of its {config.steps} steps")
            if config.trace:
                shown.note("--trace: no step is left to trace; raise --steps")
            return DONE
        start = Start(
            config=config,
            model=model,
            hardware=hardware,
            choice=choice,
            dataset=_dataset(config, model, previous, shown),
            previous=previous,
            progress=progress,
        )
        _describe(start, shown)
        shown.doing("preparing the programs")
        try:
            return _train(start, shown, begin_s)
        except WorkerLost as lost:
            raise _without(lost, config) from lost


def _without(lost: WorkerLost, config: RunConfig) -> Failed:
    """What to say when a worker is gone and could not be brought back."""
    local = config.launcher == "processes"
    logs = f"the logs in {config.run_dir / LOGS}" if local else "Ray's logs"
    return Failed(
        f"got: {lost}\n"
        f"allowed: all workers of the plan; {len(lost.reports)} others were fine\n"
        f"fix: see {logs}, then run the same command again: it goes on from the last "
        "checkpoint"
    )


def _dataset(
    config: RunConfig, model: Model, previous: Previous | None, shown: Display
) -> Dataset:
    """Open the run's own data, also if its source has changed since; else prepare."""
    shown.doing("opening the text")
    path, cache_dir = config.data.path, config.data.cache_dir.expanduser()
    if previous is None:
        return prepare(cache_dir, path, model.vocab_size, shown.note, shown.doing)
    if path == previous.config.data.path and previous.dataset.exists():
        dataset = load(previous.dataset)
    else:
        dataset = prepare(cache_dir, path, model.vocab_size, shown.note, shown.doing)
    rundir.check_same_data(previous, dataset, config.run_dir)
    return dataset


def _describe(start: Start, shown: Display) -> None:
    model, cluster = start.model, start.hardware.cluster
    millions = sum(map(parameter_count, model.layers)) / 1e6
    nodes = ", ".join(f"{n.name} {n.count} x {n.device}" for n in cluster.nodes)
    held = start.hardware.devices.values()
    on = ", ".join({d.platform for devices in held for d in devices}) or "workers"
    dataset = start.dataset
    shown.note(f"model: {model.name}, {millions:,.1f} M parameters")
    shown.note(
        f"data: {len(dataset.train_T):,} tokens, {dataset.bytes_per_token:.2f} bytes "
        f"per token, {dataset.directory}"
    )
    shown.note(f"cluster ({start.hardware.source}): {nodes}; on {on}")
    shown.note(f"plan ({start.choice.source}):\n{start.choice.plan}")


def _train(start: Start, shown: Display, begin_s: float) -> int:
    config, run_dir = start.config, start.config.run_dir
    told = SimpleQueue[Notice]()  # by workers, from when they start
    with driver_of(start, shown, told.put) as driver:
        check_reached(driver.at, config)
        metrics, events = _begin(start, driver, shown)
        with ExitStack() as stack:
            stack.enter_context(closing(metrics))
            stack.enter_context(closing(events))
            stop = stack.enter_context(StopRequest())
            heard = _node_or_all(driver, stop, events, shown)
            stack.enter_context(Watch(heard, run_dir))
            # a thread of its own: a cloud's server may be slow to answer
            stack.enter_context(Watch(heard, None, {of_workers(told): _TOLD_EVERY_S}))
            loop = Loop(
                config=config,
                driver=driver,
                dataset=start.dataset,
                learning_rates=LearningRates(config.optimizer, config.steps, driver.at),
                metrics=metrics,
                evaluated=evaluated(run_dir),
                heard_saved=lambda step: event(events, "saved", step),
                seconds_at_peak=None
                if config.simulate
                else seconds_at_peak(
                    start.choice.plan, start.model, start.hardware.cluster
                ),
                trace=run_dir / rundir.TRACE if config.trace else None,
                display=shown,
                stop=stop,
                spent=Spent(after=driver.at),
            )

            def recovered(found: Recovered) -> None:
                loop.hear(found)
                _recovered(found, run_dir, events, shown)

            driver.heard, driver.hurried = recovered, lambda: stop.leaves_no_time
            shown.doing("the first step")
            step = loop.run(driver.at)
            total_s = time.perf_counter() - begin_s
            found = loop.spent.goodput(read_journal(run_dir / rundir.METRICS), total_s)
            _say_goodput(found, step, events, shown)
            return _end(start, step, stop, events, shown)


def _node_or_all(
    driver: Driver, stop: StopRequest, events: Journal, shown: Display
) -> Callable[[Notice], None]:
    """What a notice does: go on without its node, if it names one, else stop."""

    def heard(notice: Notice) -> None:
        node, source, grace_s = notice.node, notice.source, round(notice.grace_s, 1)
        goes_on = node is not None and driver.leave(node)
        if not goes_on:
            stop.hear(notice)
        told = {"node": node, "source": source, "grace_s": grace_s}
        event(events, "noticed", driver.at, **told)
        if node is not None:
            then = "goes on without it after this step" if goes_on else "stops"
            shown.note(f"{source}: node {node!r} goes in {grace_s:g} s; the run {then}")

    return heard


def _begin(start: Start, driver: Driver, shown: Display) -> tuple[Journal, Journal]:
    """Write what this start runs with; open metrics.jsonl and events.jsonl."""
    config, run_dir = start.config, start.config.run_dir
    rundir.write_start(
        run_dir, config, start.dataset, start.hardware.cluster, start.choice.plan
    )
    metrics = Journal(run_dir / rundir.METRICS, last_step=driver.at)
    events = Journal(run_dir / rundir.EVENTS, last_step=config.steps)
    if driver.resumed is not None:
        event(events, "restored", driver.at, **driver.resumed)
        shown.note(f"resumed at step {driver.at}{_origin(driver.resumed)}")
    if start.previous is None:
        event(events, "started", driver.at, plan=start.choice.source)
        return metrics, events
    if start.previous.plan != start.choice.plan:
        event(events, "replanned", driver.at, plan=start.choice.source)
        shown.note(f"another plan than before, from {start.choice.source}")
    changed = rundir.changes(start.previous, config)
    for name, (was, now) in changed.items():
        if name not in _PASSING:
            shown.note(f"{name} is {now} from here on (was {was})")
            event(events, "reconfigured", driver.at, setting=name, was=was, now=now)
    return metrics, events


def _recovered(
    recovered: Recovered, run_dir: Path, events: Journal, shown: Display
) -> None:
    """Say what a change has cost, and keep the plan that follows from it."""
    seconds = {phase: round(s, 3) for phase, s in recovered.seconds.items()}
    if recovered.plan is not None:
        assert recovered.cluster is not None
        rundir.write_layout(run_dir, recovered.cluster, recovered.plan)
        event(events, "replanned", recovered.step, plan=recovered.reason)
        shown.note(f"another plan than before:\n{recovered.plan}")
    event(
        events,
        "recovered",
        recovered.step,
        reason=recovered.reason,
        gone=sorted(recovered.gone),
        lost_steps=max(0, recovered.from_step - recovered.step),
        bytes=dict(recovered.num_bytes),
        tier_s={tier: round(s, 3) for tier, s in recovered.tier_s.items()},
        seconds=seconds,
    )
    moved = _moved(recovered.num_bytes, recovered.tier_s)
    shown.note(
        f"{recovered.reason}; all are at step {recovered.step} again after "
        f"{sum(seconds.values()):.1f} s ({moved or 'nothing had to move'})"
    )


def _origin(resumed: Mapping[str, Any]) -> str:
    """Where the state is from, for people."""
    if "checkpoint" in resumed:
        return f" from {resumed['checkpoint']}"
    return f" ({_moved(resumed['bytes'], resumed['seconds'])})"


def _moved(num_bytes: Mapping[str, int], seconds: Mapping[str, float]) -> str:
    return ", ".join(
        f"{n:,} bytes from {tier} in {seconds[tier]:.1f} s"
        for tier, n in num_bytes.items()
    )


def _say_goodput(found: Goodput, step: int, events: Journal, shown: Display) -> None:
    """Record what the time went into; show it if something was lost."""
    event(events, "goodput", step, **goodput_values(found))
    if found.is_disturbed:
        shown.note(goodput_line(found))


def _end(
    start: Start, step: int, stop: StopRequest, events: Journal, shown: Display
) -> int:
    """Say how it went and what to type next; return the exit code."""
    run_dir, num_steps = start.config.run_dir, start.config.steps
    if step < num_steps:
        grace = {} if stop.grace_s is None else {"grace_s": stop.grace_s}
        event(events, "preempted", step, reason=stop.reason, **grace)
        state = "state saved" if step else "nothing saved yet"
        shown.note(
            f"stopped by {stop.reason} at step {step} of {num_steps}, {state} in "
            f"{run_dir}; the same command goes on from there"
        )
        return PREEMPTED
    event(events, "finished", step)
    lines = read_journal(run_dir / rundir.METRICS)
    last = next(line for line in reversed(lines) if "val_loss" in line)
    speeds = [line["tokens_per_s"] for line in lines if "loss" in line]
    # no step's line is there if metrics.jsonl was lost after the last step
    speed = f", median tokens_per_s {median(speeds):,.0f}" if speeds else ""
    shown.note(
        f"done: {num_steps} steps, val_loss {last['val_loss']:.4f}, val_bits_per_byte "
        f"{last['val_bits_per_byte']:.4f}{speed}"
    )
    shown.note(
        f"metrics, settings and checkpoints are in {run_dir}; the same command with "
        "more --steps goes on from there"
    )
    return DONE


def event(events: Journal, name: str, step: int, **details: Any) -> None:
    """Append what happened to events.jsonl."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    events.append({"event": name, "step": step, "time": now, **details})
