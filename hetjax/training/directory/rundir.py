# SPDX-License-Identifier: Apache-2.0
"""The directory of a run: its files, the lock on it, and what a resume may change.

Owns `config.json`, `cluster.toml`, `plan.json`, the tokenizer's copy and the names of
the rest. Does not own journals (`journal.py`), which settings stay the same
(`settings/run_settings.py`) nor checkpoints (`hetjax/checkpoint/`).
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from filelock import AcquireReturnProxy, FileLock, Timeout

from hetjax.checkpoint.run_identity import RunIdentity, parse_identity
from hetjax.cluster.cluster import Cluster
from hetjax.cluster.cluster_files import cluster_toml, read_cluster
from hetjax.data.dataset import Dataset
from hetjax.data.hugging_face import FILES
from hetjax.data.settings import ingredients
from hetjax.errors import BadInput
from hetjax.files.parsing import json_value, parsed
from hetjax.files.reading import read_text
from hetjax.files.tables import as_kind, read_record
from hetjax.files.writing import naming, write_whole
from hetjax.plans.plan import Plan
from hetjax.plans.plan_files import read_plan, write_plan
from hetjax.training.settings.checks import as_options
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.run_settings import kept_names
from hetjax.training.settings.values import config_values, flat_values, read_config

CONFIG, CLUSTER, PLAN = "config.json", "cluster.toml", "plan.json"
MODEL = "model.json"  # the fields of the config.json of a model's folder
PROFILE = "profile.json"  # read, not written: from python -m hetjax.profile
CALIBRATION = "calibration.json"  # what the run measured of its own steps
PROPOSED = "proposed.json"  # another plan, to which the run does not move by itself
SLOW = "slow.json"  # what is slow at present
COMPILED = "compiled.json"  # the compiler's figures for the memory of programs
COMPILED_DETERMINISTIC = "compiled_deterministic.json"  # and of deterministic programs
METRICS, EVENTS, TRACE = "metrics.jsonl", "events.jsonl", "trace.json"
REPORT = "report.html"
CHECKPOINTS = "checkpoints"
LOG, LOGS = "log.txt", "logs"  # what users see; what workers print
JOINS = "join"  # what machines need to join: a certificate, tokens
_LOCK, LEASE = ".lock", ".lease"
# What may exist before config.json: a start that was killed has written some of it
_BEFORE_CONFIG = (
    _LOCK,
    LEASE,
    CLUSTER,
    PLAN,
    MODEL,
    *FILES,
    METRICS,
    EVENTS,
    PROFILE,
    COMPILED,
    COMPILED_DETERMINISTIC,
    LOG,
    LOGS,
    JOINS,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Previous:
    """What a run directory says of its run.

    `run` is None if the directory is from before runs had identities. `base` is the
    digest of frozen weights, if there are any (`frozen_base.py`). `plan` is None if its
    file is missing or broken; `no_plan` then says so.
    """

    config: RunConfig
    dataset: Path
    hashes: Mapping[str, str]
    cluster: Cluster
    plan: Plan | None
    run: RunIdentity | None = None
    base: str | None = None
    no_plan: str = ""

    def needed_plan(self) -> Plan:
        """Return the plan; raises BadInput if there is none."""
        if self.plan is None:
            raise BadInput(
                got=self.no_plan,
                allowed="the file as hetjax wrote it",
                fix="restore the file, or resume the run: it then plans anew",
            )
        return self.plan


class Unusable(BadInput):
    """The system does not let us read or write the run directory."""


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """Turn an OSError within `with` into Unusable, which names the run directory."""
    try:
        yield
    except OSError as error:
        file = f"{error.filename}: " if error.filename else ""
        raise Unusable(
            got=f"run directory {str(path)!r} cannot be used ({file}{error.strerror})",
            allowed="a folder that you may write to, or a path where one can be made",
            fix="give another --run-dir, or correct the permissions of this one, or "
            "make room on its disk",
        ) from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the directory for this process; remove it afterwards if it stayed empty.

    Raises BadInput if another process holds it, if it is not a run's, or if it cannot
    be made.
    """
    with usable(path):
        if not (path / CONFIG).exists():
            _refuse_strangers(path)
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass  # an old lock file may be writable in a folder that is not
        held = _acquire(path)
    with held:
        (path / _LOCK).write_text(f"{os.getpid()}\n")
        try:
            yield
        finally:
            with suppress(FileNotFoundError, NotADirectoryError):  # it was removed
                _leave_nothing(path)


def _leave_nothing(path: Path) -> None:
    if {entry.name for entry in path.iterdir()} <= {_LOCK, LEASE, LOG}:
        _remove_empty(path / LEASE)
        (path / LOG).unlink(missing_ok=True)
    if [entry.name for entry in path.iterdir()] == [_LOCK]:
        (path / _LOCK).unlink()
        path.rmdir()


def _remove_empty(folder: Path) -> None:
    """Remove a folder with its subfolders, unless one has a file: a lease."""
    if not any(path.is_file() for path in folder.rglob("*")):
        shutil.rmtree(folder, ignore_errors=True)


def check_start(config: RunConfig) -> None:
    """Raise BadInput if no run with these settings can be in its directory.

    Fast, so that callers can use it before they import JAX.
    """
    with locked(config.run_dir):
        previous = read_previous(config.run_dir)
        if previous is not None:
            check_same_run(previous, config)


def read_previous(path: Path) -> Previous | None:
    """Return what the directory holds; None if it is new.

    Raises BadInput if a file other than the plan is broken.
    """
    if not (path / CONFIG).exists():
        return None
    where, values = f"{path / CONFIG}", _read_start(path)
    dataset = read_record(
        values["dataset"],
        where=f"{where}: dataset",
        required={"directory": "a string", "sha256": "a table"},
    )
    hashes = {
        name: as_kind(value, "a string", where=f"{where}: dataset.sha256.{name}")
        for name, value in dataset["sha256"].items()
    }
    plan, no_plan = None, ""
    try:
        plan = read_plan(path / PLAN)
    except BadInput as bad:
        no_plan = bad.got
    return Previous(
        run=_identity(path, values),
        base=values.get("base"),
        config=read_config(values["config"], f"{where}: config"),
        dataset=Path(dataset["directory"]),
        hashes=hashes,
        cluster=read_cluster(path / CLUSTER),
        plan=plan,
        no_plan=no_plan,
    )


def _read_start(path: Path) -> dict[str, Any]:
    """Return the parts of `config.json`. Raises BadInput if it is broken."""
    advice = {
        "allowed": "the file as hetjax wrote it",
        "fix": "restore the file, or give another --run-dir",
    }
    raw = parsed(
        read_text(path / CONFIG, what="settings of the run"),
        json_value,
        what=f"JSON in {path / CONFIG}",
        **advice,
    )
    if not isinstance(raw, dict):
        raise BadInput(got=f"{path / CONFIG} is not a JSON object", **advice)
    return read_record(
        raw,
        where=f"{path / CONFIG}",
        required={"config": "a table", "dataset": "a table"},
        optional={"run": "a table", "base": "a string"},
    )


def read_identity(path: Path) -> RunIdentity | None:
    """Return the identity of the directory's run; None without a run or an identity."""
    if not (path / CONFIG).exists():
        return None
    return _identity(path, _read_start(path))


def _identity(path: Path, start: Mapping[str, Any]) -> RunIdentity | None:
    raw = start.get("run")
    return None if raw is None else parse_identity(raw, f"{path / CONFIG}: run")


def write_start(
    path: Path,
    run: RunIdentity,
    config: RunConfig,
    dataset: Dataset,
    cluster: Cluster,
    plan: Plan,
    base: str | None = None,
) -> None:
    """Write the files of this start, `config.json` last: with it the run exists.

    `base` is the digest of its frozen weights (`frozen_base.py`), if it has any.
    """
    write_layout(path, cluster, plan)
    for name in dataset.tokenizer_files:
        with naming(path / name):
            shutil.copyfile(dataset.directory / name, path / name)
    values = {
        "run": asdict(run),
        "config": config_values(config),
        **({"base": base} if base else {}),
        "dataset": {
            "directory": str(dataset.directory.absolute()),
            "sha256": dict(dataset.hashes),
        },
    }
    write_whole(path / CONFIG, json.dumps(values, indent=2, allow_nan=False) + "\n")


def write_layout(path: Path, cluster: Cluster, plan: Plan) -> None:
    """Write the current cluster and plan."""
    write_whole(path / CLUSTER, cluster_toml(cluster))
    write_plan(path / PLAN, plan)


def changes(previous: Previous, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return name -> (before, now) of all settings that have changed."""
    before, now = flat_values(previous.config), flat_values(config)
    return {
        name: (before[name], now[name]) for name in now if before[name] != now[name]
    }


def check_same_run(previous: Previous, config: RunConfig) -> None:
    """Raise BadInput if the settings belong to another run than the directory's."""
    changed, kept = changes(previous, config), kept_names(config)
    changed = {name: changed[name] for name in kept if name in changed}
    if not changed:
        return
    shown = ", ".join(
        f"{n} = {now!r} (was {was!r})" for n, (was, now) in changed.items()
    )
    resume = as_options({name: was for name, (was, _) in changed.items()})
    raise BadInput(
        got=f"run directory {str(config.run_dir)!r} holds another run: {shown}",
        allowed=f"the same {', '.join(kept)} as before",
        fix=f"resume that run with {resume}, or start a new one in another --run-dir",
    )


def check_same_data(previous: Previous, dataset: Dataset, run_dir: Path) -> None:
    """Raise BadInput if tokens or tokenizer are not those that the run began with."""
    was, now = previous.hashes, dataset.hashes
    unlike = sorted(name for name in {**was, **now} if was.get(name) != now.get(name))
    if not unlike:
        return
    given = ingredients(previous.config.data)
    shown = f"{given.option} {', '.join(map(str, given.sources))}"
    if not given.sources:
        shown = "the offline corpus, which depends on the installed packages"
    raise BadInput(
        got=f"data that differs from that of the run in {str(run_dir)!r}: "
        f"different hashes of {', '.join(unlike)}",
        allowed=f"the text that the run began with ({shown})",
        fix="restore that text or those package versions, or start a new run in "
        "another --run-dir",
    )


def _acquire(path: Path) -> AcquireReturnProxy:
    try:
        return FileLock(path / _LOCK).acquire(timeout=0)
    except Timeout as error:
        holder = (path / _LOCK).read_text().strip() or "unknown"
        if holder == str(os.getpid()):
            raise BadInput(
                got=f"run directory {str(path)!r} is in use by process {holder}, which "
                "is this one",
                allowed="one open Trainer per run directory",
                fix="close the other Trainer first: close(), or `with Trainer(...)`",
            ) from error
        raise BadInput(
            got=f"run directory {str(path)!r} is in use by process {holder}",
            allowed="one process per run directory",
            fix=f"wait for it or stop it (kill {holder}), or give another --run-dir",
        ) from error


def _refuse_strangers(path: Path) -> None:
    """Raise BadInput for a folder with other files: --run-dir may have a typo."""
    if not path.exists():
        return
    if (path / CHECKPOINTS).is_dir():
        raise BadInput(
            got=f"run directory {str(path)!r} has {CHECKPOINTS} but no {CONFIG}",
            allowed=f"a run's directory with its {CONFIG}",
            fix="restore that file from a copy, or give another --run-dir",
        )
    if not path.is_dir():
        found = "a file"
    else:
        names = [e.name for e in path.iterdir() if e.name not in _BEFORE_CONFIG]
        names = [name for name in names if not name.endswith(".tmp")]
        if not names:
            return
        found = f"a folder with {names[0]!r} in it and no {CONFIG}"
    raise BadInput(
        got=f"run directory {str(path)!r} is {found}",
        allowed="a run's directory, an empty folder, or a path that does not exist yet",
        fix="give another --run-dir",
    )
