# SPDX-License-Identifier: Apache-2.0
"""Machines that share no folder with the controller: mount namespaces of this machine.

Each has a folder that stands for its disk. On a machine, parts of this folder are
mounted over the controller's run directory, its cache and the state directory, and the
`hidden` paths are empty. Machines share only the compiled programs, which saves time
and changes nothing. Their processes start through the program that `Machines` writes.
"""

import os
import shlex
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_DEAD_S, _BEGUN_S = 30.0, 1.0
_UNSHARED = "unshare -m" if os.geteuid() == 0 else "unshare -rm"
_PROGRAM = """#!/bin/sh
# apart NAME WORDS...: run the words on the machine of that name
set -e
if [ -z "$APART" ]; then
    APART=1 exec {unshare} "$0" "$@"
fi
disk={disks}/$1
shift
while [ -e "$disk.off" ]; do sleep 0.1; done
mkdir -p "$disk/run" "$disk/state" "$disk/cache/compiled" {run} {state} {cache}/compiled
mount --bind {cache}/compiled "$disk/cache/compiled"
mount --rbind "$disk/cache" {cache}
mount --bind "$disk/run" {run}
mount --bind "$disk/state" {state}
{hide}
unset APART
XDG_STATE_HOME={state} exec "$@"
"""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Machines by name, with disks below `folder`; the controller's `hidden` files and
    folders are empty on them."""

    folder: Path
    run_dir: Path
    cache: Path
    hidden: tuple[Path, ...] = ()

    @property
    def program(self) -> Path:
        """The program that runs words on a machine, written once."""
        path = self.folder / "apart"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            empty = self.folder / "empty"
            empty.mkdir()
            hide = [
                f"mount --bind {shlex.quote(str(empty if h.is_dir() else '/dev/null'))}"
                f" {shlex.quote(str(h))}"
                for h in self.hidden
            ]
            path.write_text(
                _PROGRAM.format(
                    unshare=_UNSHARED,
                    disks=shlex.quote(str(self.folder)),
                    run=shlex.quote(str(self.run_dir)),
                    cache=shlex.quote(str(self.cache)),
                    state=shlex.quote(str(self.folder / "home")),
                    hide="\n".join(hide),
                )
            )
            path.chmod(0o755)
        return path

    def disk(self, name: str) -> Path:
        return self.folder / name

    @contextmanager
    def off(self, name: str) -> Iterator[None]:
        """Keep new processes of the machine waiting."""
        mark = self.folder / f"{name}.off"
        mark.touch()
        try:
            time.sleep(_BEGUN_S)  # processes past the mark have their disk
            yield
        finally:
            mark.unlink()

    def lose_disk(self, name: str) -> None:
        """Give the machine's next start an empty disk."""
        shutil.rmtree(self.disk(name))

    def saved(self, name: str) -> list[str]:
        """Return the parts of checkpoints on its disk, as STEP/WORKER."""
        parts = self.disk(name).glob("state/hetjax/*/step_*/*/manifest.json")
        return sorted(
            f"{p.parts[-3].removeprefix('step_').lstrip('0')}/{p.parts[-2]}"
            for p in parts
        )


def switch_off(pid: int) -> None:
    """Kill all processes on this process's machine; return once they are dead."""
    machine = os.readlink(f"/proc/{pid}/ns/mnt")
    assert machine != os.readlink("/proc/self/ns/mnt"), "it is this machine"
    end_s = time.monotonic() + _DEAD_S
    while running := running_on(machine):
        assert time.monotonic() < end_s, running
        for each in running:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        time.sleep(0.02)


def running_beside(pid: int) -> list[int]:
    """Return the processes on this process's machine; none if that is this machine."""
    machine = os.readlink(f"/proc/{pid}/ns/mnt")
    return [] if machine == os.readlink("/proc/self/ns/mnt") else running_on(machine)


def running_on(machine: str) -> list[int]:
    """Return the processes in a mount namespace; zombies have no namespace."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/ns/mnt"):
        with suppress(OSError):
            if os.readlink(entry) == machine:
                found.append(int(entry.parts[2]))
    return found
