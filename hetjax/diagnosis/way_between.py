# SPDX-License-Identifier: Apache-2.0
"""Measures the connections between a launcher's machines, as links of a cluster.

`python -m hetjax.diagnosis.way_between listen` runs at one end: it prints its port and
answers until its standard input ends. With HOST:PORT in place of `listen` it is the
other end. Owns which pairs are measured. Does not own the measurement (`peers.py`), nor
how to reach a machine (`hetjax/launchers/on_machines.py`).
"""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import combinations

from hetjax.cluster.cluster import Cluster, Link
from hetjax.cluster.machines import Machine
from hetjax.diagnosis.facts import Peer
from hetjax.diagnosis.peers import answer, ask, listen
from hetjax.errors import BadInput
from hetjax.files.parsing import json_value
from hetjax.files.tables import read_fields
from hetjax.launchers.on_machines import Reach

_MODULE = "hetjax.diagnosis.way_between"
_ASK_S, _LISTEN_S = 60.0, 600.0


def ways_between(
    reach: Reach, machines: Sequence[Machine]
) -> dict[tuple[str, str], Peer]:
    """Return the measured connection from each machine to each later one, by ids."""
    found = {}
    whole = list({machine.id: machine for machine in machines}.values())
    for position, listener in enumerate(whole[1:], start=1):
        with _listening(reach, listener) as port:
            address = f"{reach.place(listener, {}).address}:{port}"
            for asker in whole[:position]:
                found[asker.id, listener.id] = measured_from(reach, asker, address)
    return found


def links_of(
    cluster: Cluster,
    machines: Mapping[str, Machine],
    ways: Mapping[tuple[str, str], Peer],
) -> tuple[Link, ...]:
    """Return the links between nodes, as measured between their first workers'
    machines."""
    found = []
    for left, right in combinations(cluster.nodes, 2):
        here, there = (machines[node.workers[0]].id for node in (left, right))
        way = ways.get((here, there)) or ways.get((there, here))
        if way is not None and way.error is None:
            found.append(
                Link(
                    between=(left.name, right.name),
                    bandwidth_gbit_per_s=float(f"{way.gbit_per_s:.3g}"),
                    latency_ms=float(f"{way.latency_ms:.3g}"),
                )
            )
    return tuple(found)


@contextmanager
def _listening(reach: Reach, machine: Machine) -> Iterator[str]:
    """Let the machine answer, and yield its port; empty if it does not start."""
    with subprocess.Popen(
        _words(reach, machine, "listen"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


def measured_from(reach: Reach, machine: Machine, address: str) -> Peer:
    """Measure the connection from a machine to HOST:PORT, where `peers.answer` runs."""
    try:
        done = subprocess.run(
            _words(reach, machine, address),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_S,
        )
        peer = json_value(done.stdout.splitlines()[-1])
        return Peer(**read_fields(peer, Peer, where=machine.id))
    except (subprocess.TimeoutExpired, IndexError, ValueError, BadInput):
        return Peer(address=address, error=f"{machine.id} did not measure it")


def _words(reach: Reach, machine: Machine, argument: str) -> list[str]:
    place = reach.place(machine, {})
    return [*place.prefix, place.python, "-m", _MODULE, reach.spelled(argument)]


def main(argument: str) -> None:
    """Run one end of a measured connection."""
    if argument != "listen":
        found = asdict(ask(argument))
        print(json.dumps({k: v for k, v in found.items() if v is not None}))
        return
    with listen(0) as listening:
        print(listening.getsockname()[1], flush=True)

        def end_with_input() -> None:
            sys.stdin.read()
            listening.close()

        threading.Thread(target=end_with_input, daemon=True).start()
        answer(listening, _LISTEN_S)


if __name__ == "__main__":
    main(sys.argv[1])
