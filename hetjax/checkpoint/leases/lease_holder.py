# SPDX-License-Identifier: Apache-2.0
"""Defines the holder of a lease: a process of some machine, and its run.

Owns the test whether a holder is known to be dead or alive. Does not own leases
(`lease.py`).
"""

import json
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hetjax.checkpoint.run_identity import UNIDENTIFIED, RunId


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process; `machine` tells whether its `pid` means the same here.

    It holds the lease for the run with the identity `run`, whose directory is `home`.
    """

    token: str
    host: str
    pid: int
    machine: str
    started: str
    run: RunId = UNIDENTIFIED
    home: str = ""

    def __str__(self) -> str:
        of = f" (run {self.run})" if self.run else ""
        return f"process {self.pid} on {self.host}{of}"

    @property
    def is_known_dead(self) -> bool:
        """Whether it was a process of this machine and has ended."""
        return self._is_here and _started(self.pid) != self.started

    @property
    def is_known_alive(self) -> bool:
        return self._is_here and _started(self.pid) == self.started

    @property
    def _is_here(self) -> bool:
        return bool(self.machine) and self.machine == _machine()


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldFor:
    """The run that a lease is taken for.

    `home` names the run's directory, and distinguishes it from a copy. If the new
    holder `succeeds`, it need not wait for a holder from the same home: the lease on
    that home shows that the earlier one is over.
    """

    run: RunId = UNIDENTIFIED
    home: str = ""
    succeeds: bool = False

    def follows(self, holder: Holder | None) -> bool:
        """Return whether the new holder need not wait for this one."""
        if holder is None:
            return False
        is_earlier = self.succeeds and bool(self.home) and holder.home == self.home
        return is_earlier or holder.is_known_dead

    def excludes(self, holder: Holder | None) -> bool:
        """Return whether this holder is known to be alive in another directory."""
        if holder is None or not holder.home or holder.home == self.home:
            return False
        return holder.is_known_alive


NOBODY = HeldFor()


def holder_here(held_for: HeldFor) -> Holder:
    """Return this process as the holder of a new lease."""
    pid = os.getpid()
    return Holder(
        token=secrets.token_hex(16),
        host=socket.gethostname(),
        pid=pid,
        machine=_machine(),
        started=_started(pid),
        run=held_for.run,
        home=held_for.home,
    )


def holder_text(holder: Holder) -> str:
    """Return the text of a lease's holder file."""
    return json.dumps(asdict(holder)) + "\n"


def _machine() -> str:
    """Return this boot of this machine and its space of process ids; "" if unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _started(pid: int) -> str:
    """Return the start time of a local process, in ticks as text; "" if there is none.

    The system reuses ids, but not the pair of id and start time.
    """
    with suppress(OSError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        state, *rest = stat.rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]
    return ""
