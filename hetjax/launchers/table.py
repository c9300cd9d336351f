# SPDX-License-Identifier: Apache-2.0
"""Lists the launchers that a run may name, and what follows from the name alone.

Owns the table of launchers: a launcher needs only a row here and the file that the row
names. Does not own what such a file defines (`launcher.py`). Imports nothing that takes
time, as help shows the table.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from typing_extensions import Doc


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherRow:
    """What must be known of a launcher before, or without, starting anything."""

    summary: str
    """Where its workers run, for help."""
    module: str
    """Its module, which is imported when a run uses it."""
    has_worker_processes: bool = True
    """Whether workers are separate processes: they can be lost, are started again, and
    send each other what a step needs. Otherwise the process of the run is the only
    worker, has all devices and sees everything saved."""
    workers_are_here: bool = False
    """Whether workers are on this machine, and have its devices. Otherwise the
    launcher's file finds machines (`RemoteLauncherFile`)."""
    shares_disk: bool = False
    """Whether workers write to one disk, on which copies of each other's state are
    useless, unless every worker has its own folder."""
    finder: str = ""
    """Whose list of machines counts if no cluster file is given; empty if workers are
    here."""
    reads_hosts: bool = False
    """Whether its machines are listed in a file, `--hosts`."""
    waits_for_joins: bool = False
    """Whether its machines join by themselves, at `--join.address`."""
    logs: str = "the logs in {logs}"
    """Where users find the output of workers. {logs} is the run's folder for it, which
    is empty if the launcher's own system keeps the output."""


LAUNCHERS: Mapping[str, LauncherRow] = {
    "embedded": LauncherRow(
        summary="in this process",
        module="hetjax.launchers.in_process",
        has_worker_processes=False,
        workers_are_here=True,
        shares_disk=True,
    ),
    "processes": LauncherRow(
        summary="in processes on this machine",
        module="hetjax.launchers.local_processes",
        workers_are_here=True,
        shares_disk=True,
    ),
    "ray": LauncherRow(
        summary="on Ray's machines",
        module="hetjax.launchers.on_ray",
        finder="Ray's",
        logs="Ray's logs",
    ),
    "slurm": LauncherRow(
        summary="on the nodes of a Slurm job",
        module="hetjax.launchers.slurm.on_slurm",
        finder="Slurm's",
    ),
    "ssh": LauncherRow(
        summary="on hosts by ssh",
        module="hetjax.launchers.over_ssh",
        finder="the hosts'",
        reads_hosts=True,
    ),
    "join": LauncherRow(
        summary="on machines that join by themselves",
        module="hetjax.launchers.by_joining",
        finder="the machines'",
        waits_for_joins=True,
        logs="the machines' own output",
    ),
}
LOCAL_PROCESSES = "processes"  # for a run that cannot be in one process
_HELP = ", ".join(f"{row.summary} ({name})" for name, row in LAUNCHERS.items())

if TYPE_CHECKING:
    LauncherName = str  # type checkers cannot read a table
else:
    LauncherName = Annotated[Literal[*LAUNCHERS], Doc(f"Where workers run: {_HELP}.")]


def with_worker_processes() -> str:
    """Return the names of launchers whose workers can be lost, for people.

    >>> with_worker_processes()
    'processes, ray, slurm, ssh or join'
    """
    return _either(n for n, row in LAUNCHERS.items() if row.has_worker_processes)


def with_own_disks() -> str:
    """Return the names of launchers whose workers have disks of their own, for people.

    >>> with_own_disks()
    'ray, slurm, ssh or join'
    """
    return _either(n for n, row in LAUNCHERS.items() if not row.shares_disk)


def _either(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
