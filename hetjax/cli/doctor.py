# SPDX-License-Identifier: Apache-2.0
"""The command `doctor`: finds problems before a run does.

Owns its options, its help and its exit codes. Does not own facts and checks
(`hetjax/diagnosis/`) nor how findings are shown (`report/diagnosis.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from hetjax.cli.command import main_of
from hetjax.cli.options.options import parse_options
from hetjax.errors import BadInput
from hetjax.report.progress import working

_PROGRAM = "python -m hetjax.doctor"
_HELP = """Check packages and plugins, devices and drivers, and what the options name: a
cluster file, a run directory, a store, ports, the links to other machines. For every
problem, print what to type. Every check has a timeout of some seconds.

This machine alone:
  python -m hetjax.doctor

All that a run will need:
  python -m hetjax.doctor --cluster mine.toml --run-dir /shared/run
      --cloud gs://bucket/run --ports 6379

The link from machine a to machine b:
  b: python -m hetjax.doctor --listen 7431
  a: python -m hetjax.doctor --peers b:7431

All machines that a run will use, from here, or from within a Slurm job:
  python -m hetjax.doctor --ssh hosts.toml --run-dir /shared/run
  python -m hetjax.doctor --slurm --run-dir /shared/run

Exit codes: 0 no problem, 1 a problem, 2 bad input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    """What to check besides this machine."""

    cluster: Path | None = None
    """Cluster file, or lab, office or tiny."""
    run_dir: Path | None = None
    """Directory of a run: can it be written, how fast, and is it in use?"""
    cloud: str | None = None
    """Checkpoint store, as in --checkpoint.cloud."""
    endpoint: str | None = None
    """Server of that store, as in --checkpoint.endpoint."""
    ports: tuple[int, ...] = ()
    """TCP ports that must be free on this machine: 6379 for Ray, for instance."""
    peers: tuple[str, ...] = ()
    """Machines to measure the connection to, each HOST:PORT, where --listen PORT
    runs."""
    listen: int | None = None
    """Only answer the --peers of other machines, at this port, for ten minutes."""
    ssh: Path | None = None
    """File of hosts, as for hetjax launch ssh; check each of them, too."""
    slurm: tyro.conf.FlagCreatePairsOff[bool] = False
    """Check each node of the Slurm job that this command runs in, too."""
    probe: tyro.conf.FlagCreatePairsOff[bool] = False
    """Only measure the devices here, up to 20 s for each kind, and print nodes for a
    cluster file."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object instead of the table."""


def doctor(arguments: Sequence[str]) -> int:
    """Check what the arguments name, print the findings, and return the exit code."""
    default = DoctorOptions()
    options = parse_options(default, arguments, program=_PROGRAM, description=_HELP)
    for problem in _problems(options):
        raise problem
    if options.listen is not None:
        return _listen(options.listen)
    if options.probe:
        return _probe()
    with working("looking"):  # JAX takes seconds to import
        from hetjax.api.doctor import diagnose

        found = diagnose(
            cluster=options.cluster,
            run_dir=options.run_dir,
            cloud=options.cloud,
            endpoint=options.endpoint,
            ports=options.ports,
            peers=options.peers,
            ssh=options.ssh,
            slurm=options.slurm,
        )
    if options.json:
        print(found.json())
    else:
        from rich.console import Console

        found.show(Console())
    return 1 if found.problems else 0


def _problems(options: DoctorOptions) -> list[BadInput]:
    found = []
    for name, number in [
        *(("ports", number) for number in options.ports),
        *([("listen", options.listen)] if options.listen is not None else []),
    ]:
        if not 0 < number < 2**16:
            got = f"--{name} {number}"
            fix = f"give --{name} 7431, say"
            found.append(BadInput(got=got, allowed="1 <= port <= 65535", fix=fix))
    for peer in options.peers:
        host, _, port = peer.rpartition(":")
        if not host or not port.isdigit():
            found.append(
                BadInput(
                    got=f"--peers {peer}",
                    allowed="HOST:PORT,...",
                    fix=f"give --peers {host or peer}:7431, say, after hetjax doctor "
                    "--listen 7431 there",
                )
            )
    if options.json and (options.probe or options.listen is not None):
        found.append(
            BadInput(
                got="--json with --probe or --listen",
                allowed="--json with checks",
                fix="leave --json out: --probe prints TOML",
            )
        )
    return found


def _listen(port: int) -> int:
    from hetjax.diagnosis.peers import LISTEN_S, answer, listen

    try:
        listening = listen(port)
    except OSError as error:
        raise BadInput(
            got=f"--listen {port}: {error.strerror}",
            allowed="a free port",
            fix=f"--listen {port + 1 if port < 2**16 - 1 else 7431}, say",
        ) from error
    print(
        f"listening at port {port} for {LISTEN_S / 60:.0f} minutes; on another machine "
        f"type: hetjax doctor --peers HOST:{port}, where HOST is this one's name",
        flush=True,
    )
    with listening:
        count = answer(listening)
    print(f"answered {count} times")
    return 0


def _probe() -> int:
    with working("measuring"):
        from hetjax.api.doctor import measured_nodes

        nodes = measured_nodes()
    print(nodes, end="")
    return 0


main = main_of(doctor)
