# SPDX-License-Identifier: Apache-2.0
"""What a run writes and says besides its steps: its start, recoveries and its end.

Owns the lines of `events.jsonl` and the words for people, also for the end of a run
that cannot go on: full disks, stores that fail, lost workers. Does not own the run
(`run.py`) nor the lines of `metrics.jsonl` (`loop.py`).
"""

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from hetjax.checkpoint.stores.store import StoreError
from hetjax.data.batches import packing
from hetjax.data.dataset import Dataset
from hetjax.elastic.driver import Driver
from hetjax.elastic.notices import StopRequest
from hetjax.elastic.recovered import Recovered, Rerouted
from hetjax.errors import RunFailed
from hetjax.models.model import parameter_count
from hetjax.report.progress import Display
from hetjax.runtime.rpc.worker_connections import WorkerLost
from hetjax.training import rundir
from hetjax.training.config import RunConfig
from hetjax.training.config_checks import option
from hetjax.training.goodput import Goodput
from hetjax.training.hardware import share_of_gpus
from hetjax.training.run_settings import PASSING
from hetjax.training.rundir import LOGS, Journal, read_journal
from hetjax.training.starting import Start
from hetjax.training.step_comparison import StepComparison

DONE, PREEMPTED = 0, 4  # exit codes
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def describe(start: Start, dataset: Dataset, shown: Display) -> None:
    """Say what a start has settled: model, text, cluster and plan."""
    model, cluster = start.model, start.hardware.cluster
    millions, trained = (
        sum(parameter_count(layer, trained=part) for layer in model.layers) / 1e6
        for part in (False, True)
    )
    part = "" if trained == millions else f", of which {trained:,.2f} M are trained"
    nodes = ", ".join(f"{n.name} {n.count} x {n.device}" for n in cluster.nodes)
    held = start.hardware.devices.values()
    on = ", ".join({d.platform for devices in held for d in devices}) or "workers"
    shown.note(f"model: {model.name}, {millions:,.1f} M parameters{part}")
    shown.note(
        f"data: {dataset.num_tokens:,} tokens, {dataset.bytes_per_token:.2f} bytes "
        f"per token, {dataset.directory}"
    )
    if start.config.data.pack:
        shown.note(f"packing: {packing(dataset.trains, start.config.seq_len)}")
    shown.note(f"cluster ({start.hardware.source}): {nodes}; on {on}")
    if share := share_of_gpus(start.config, cluster):
        shown.note(f"memory: JAX takes {share:.0%} of each GPU's when it starts")
    shown.note(f"plan ({start.choice.source}):\n{start.choice.plan}")


def begin(
    start: Start, dataset: Dataset, driver: Driver, shown: Display
) -> tuple[Journal, Journal]:
    """Write what this start runs with; open metrics.jsonl and events.jsonl."""
    config, run_dir = start.config, start.config.run_dir
    rundir.write_start(
        run_dir,
        driver.run or start.run,
        config,
        dataset,
        start.hardware.cluster,
        start.choice.plan,
    )
    check = start.check_leases
    metrics = Journal(run_dir / rundir.METRICS, last_step=driver.at, may_write=check)
    events = Journal(run_dir / rundir.EVENTS, last_step=config.steps, may_write=check)
    if driver.resumed is not None:
        missing = _missing(read_journal(run_dir / rundir.METRICS), driver.at)
        if missing:
            shown.note(
                f"{rundir.METRICS} lacks lines of steps up to {missing[-1]}: they were "
                "removed, or undone before the checkpoint after them was found whole"
            )
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
        if name not in PASSING:
            shown.note(f"{name} is {now} from here on (was {was})")
            event(events, "reconfigured", driver.at, setting=name, was=was, now=now)
    return metrics, events


def _missing(lines: Sequence[Mapping[str, Any]], last: int) -> list[int]:
    """Steps up to the last that have no line, though later ones may.

    >>> _missing([{"step": 1, "loss": 2.0}, {"step": 3, "reason": "overflow"}], 4)
    [2, 4]
    """
    told = {line["step"] for line in lines if "val_loss" not in line}
    return sorted({*range(1, last + 1)} - told)


def record_recovery(
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


def record_rerouting(rerouted: Rerouted, events: Journal, shown: Display) -> None:
    """Say whose samples others train on until they are back."""
    took_s = sum(rerouted.seconds.values())
    event(
        events,
        "rerouted",
        rerouted.step,
        reason=rerouted.reason,
        replicas=list(rerouted.replicas),
        seconds=round(took_s, 3),
    )
    named = ", ".join(map(str, rerouted.replicas))
    shown.note(
        f"{rerouted.reason}; others have the samples of replica {named} after "
        f"{took_s:.1f} s, while it is started again"
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


def record_comparison(
    comparison: StepComparison,
    events: Journal,
    shown: Display,
    step: int,
    step_time_s: float,
) -> None:
    """Say once for each plan how its measured step time compares to the predicted."""
    found = comparison.add(step_time_s)
    if found is not None:
        event(events, "compared", step, **found.values())
        shown.note(str(found))


def record_goodput(found: Goodput, step: int, events: Journal, shown: Display) -> None:
    """Record what the time went into; show it if something was lost."""
    event(events, "goodput", step, **found.values())
    if found.is_disturbed:
        shown.note(str(found))


def finish(
    start: Start,
    step: int,
    stop: StopRequest,
    events: Journal,
    shown: Display,
    again: str,
) -> int:
    """Say how it went, and that `again` goes on from there; return the exit code."""
    run_dir, num_steps = start.config.run_dir, start.config.steps
    if step < num_steps:
        grace = {} if stop.grace_s is None else {"grace_s": stop.grace_s}
        event(events, "preempted", step, reason=stop.reason, **grace)
        state = "state saved" if step else "nothing saved yet"
        shown.note(
            f"stopped by {stop.reason} at step {step} of {num_steps}, {state} in "
            f"{run_dir}; {again} goes on from there"
        )
        return PREEMPTED
    event(events, "finished", step)
    lines = read_journal(run_dir / rundir.METRICS)
    last = next(line for line in reversed(lines) if "val_bits_per_byte" in line)
    speeds = [line["tokens_per_s"] for line in lines if "tokens_per_s" in line]
    # no step's line is there if metrics.jsonl was lost after the last step
    speed = f", median tokens_per_s {median(speeds):,.0f}" if speeds else ""
    shown.note(
        f"done: {num_steps} steps, val_loss {last['val_loss']:.4f}, val_bits_per_byte "
        f"{last['val_bits_per_byte']:.4f}{speed}"
    )
    shown.note(
        f"metrics, settings and checkpoints are in {run_dir}; {again} with more "
        "--steps goes on from there"
    )
    return DONE


def event(events: Journal, name: str, step: int, **details: Any) -> None:
    """Append what happened to events.jsonl."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    events.append({"event": name, "step": step, "time": now, **details})


@contextmanager
def clear_ends(config: RunConfig) -> Iterator[None]:
    """Turn a full disk, a store that fails and a lost worker into RunFailed."""
    try:
        yield
    except StoreError as error:
        raise _failed(
            error,
            "a store that answers and has what was stored "
            f"({option('checkpoint.cloud')} {config.checkpoint.cloud})",
            "see that it can be reached from here",
        ) from error
    except WorkerLost as lost:  # it is gone, and could not be brought back
        ray = config.launcher == "ray"
        logs = "Ray's logs" if ray else f"the logs in {config.run_dir / LOGS}"
        allowed = f"all workers of the plan; {len(lost.reports)} others were fine"
        raise _failed(lost, allowed, f"see {logs}") from lost
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise _failed(
            f"{error.filename or f'a file of the run in {config.run_dir}'}: "
            f"{error.strerror}",
            "room for the run's files; what was written before is as it was",
            "make room on that disk",
        ) from error


def _failed(got: object, allowed: str, fix: str) -> RunFailed:
    again = "then run the same command again: it goes on from the last checkpoint"
    return RunFailed(got=str(got), allowed=allowed, fix=f"{fix}, {again}")
