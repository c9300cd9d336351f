# SPDX-License-Identifier: Apache-2.0
"""Checks the machines of a launcher as a run would use them, all from here.

Each machine checks itself and measures its connection to this machine, which all
workers have to reach. All side effects are here; every query has a timeout. Owns the
queries. Does not own how to reach a machine (`hetjax/launchers/`), its answer
(`on_machine.py`), nor the judgement (`machine_checks.py`).
"""

import subprocess
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile

from hetjax.cluster.cluster import Cluster
from hetjax.cluster.machines import Machine
from hetjax.diagnosis.facts import Machines, OtherMachine, Peer
from hetjax.diagnosis.gathering import nearest_folder
from hetjax.diagnosis.on_machine import read_machine, versions_here
from hetjax.diagnosis.peers import answer, listen
from hetjax.diagnosis.way_between import measured_from
from hetjax.errors import BadInput
from hetjax.launchers.on_machines import (
    Reach,
    address_towards,
    placed,
    run_on_machine,
)

_MODULE = "hetjax.diagnosis.on_machine"
_LOOK_S = 120.0  # JAX starts there, with a timeout of 45 s
_LISTEN_S = 600.0


def look_at_machines(
    reach: Reach, run_dir: Path | None, cluster: Cluster | None = None
) -> Machines:
    """Check all machines that are there; report the others as `absent`.

    `absent` also has the first node of `cluster` that gets no machine.
    """
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            parts = reach.machines(looks=False)
        except BadInput as bad:
            return Machines(versions=versions_here(), absent=((bad.got, bad.fix),))
    there = _whole(parts)
    absent = [(str(each.message), reach.unreached) for each in warned]
    absent += [] if cluster is None else _unplaced(reach, cluster)
    with (
        _answering() as port,
        _file_of(run_dir) as file,
        ThreadPoolExecutor(len(there)) as pool,
    ):
        address = f"{reach.controller or address_towards(there)}:{port}"
        # one after the other, or they would share this machine's network
        ways = {m.id: measured_from(reach, m, address) for m in there}
        found = pool.map(lambda m: _looked_at(reach, m, file, ways[m.id]), there)
        machines = tuple(
            replace(each, granted=_granted(machine, parts))
            for machine, each in zip(there, found, strict=True)
        )
    return Machines(versions=versions_here(), absent=tuple(absent), machines=machines)


def _whole(machines: Sequence[Machine]) -> list[Machine]:
    """Return one entry per machine; some are in parts, one for each kind of card."""
    return [*{machine.whole: machine for machine in machines}.values()]


def _unplaced(reach: Reach, cluster: Cluster) -> list[tuple[str, str]]:
    """Return the error that a run on this cluster would start with, and its fix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each machine reports its own cards
        try:
            placed(reach, cluster, reach.machines(looks=True), simulate=False)
        except BadInput as bad:
            return [(bad.got, f"{bad.fix}. With --simulate, any machine will do")]
    return []


def _granted(whole: Machine, parts: Sequence[Machine]) -> tuple[tuple[str, int], ...]:
    own = (m for m in parts if m.whole == whole.whole and m.device != "cpu")
    return tuple((machine.device, machine.count) for machine in own)


def _looked_at(reach: Reach, machine: Machine, file: str, way: Peer) -> OtherMachine:
    name = machine.whole
    try:
        done = run_on_machine(reach, machine, {}, [_MODULE, file], _LOOK_S)
        found = read_machine(name, done.stdout, way)
    except subprocess.TimeoutExpired:
        return OtherMachine(name=name, way=way, error=f"no answer in {_LOOK_S:g} s")
    except (BadInput, ValueError) as bad:
        return OtherMachine(name=name, way=way, error=f"malformed answer: {bad}")
    if found is None:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return OtherMachine(name=name, way=way, error=said[-1])
    return found


@contextmanager
def _answering() -> Iterator[int]:
    """Answer at a port that the system chooses, as a run's controller listens at one,
    and yield the port."""
    with listen(0) as listening:
        thread = threading.Thread(target=answer, args=(listening, _LISTEN_S))
        thread.daemon = True
        thread.start()
        yield listening.getsockname()[1]
        listening.close()
        thread.join()


@contextmanager
def _file_of(run_dir: Path | None) -> Iterator[str]:
    """Yield the path of a temporary file in the run directory, or in the folder where
    that will be."""
    if run_dir is None:
        yield ""
        return
    try:
        file = NamedTemporaryFile(dir=nearest_folder(run_dir), prefix=".hetjax-doctor-")
    except OSError:  # reported by the check of the run directory
        yield ""
        return
    with file:
        yield str(Path(file.name).absolute())
