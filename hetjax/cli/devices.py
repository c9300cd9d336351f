# SPDX-License-Identifier: Apache-2.0
"""The command `devices`: lists the devices of the catalogue and of this machine.

Owns its options and its table. Does not own the catalogue (`cluster/catalogue.py`) nor
the probe of this machine (`launchers/device_probe.py`).
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from hetjax.cli.command import main_of, write_file
from hetjax.cli.options.options import parse_options
from hetjax.cluster.catalogue import DeviceSpec, candidates, catalogue
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.errors import BadInput
from hetjax.report.progress import working

_PROGRAM = "python -m hetjax.devices"
_HELP = """List the devices that hetjax knows: their names in a cluster file, memory,
peak, watts and prices. With WORD, list only devices whose name or alias matches it.
Without WORD, list all, and the accelerators of this machine.

  python -m hetjax.devices "A100 80GB"

With --ssh, probe the hosts of a file instead, measure the links between them, and
write their cluster file.

Exit codes: 0 done, 1 hosts did not answer and are not in the cluster file, 2 bad input,
such as a word that matches no device."""
_ROW = "{:<42} {:>10} {:>9} {:>6} {:>11} {:>11}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicesOptions:
    """Which devices to list."""

    word: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WORD")] = ""
    """Name of a device, or a part of it; if empty, all devices."""
    ssh: Path | None = None
    """File of hosts to probe instead, as for hetjax launch ssh."""
    output: Path | None = None
    """Where to write the hosts' cluster file; None: print it."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object instead of the table."""


def devices(arguments: Sequence[str]) -> int:
    """Print the devices that the arguments select; return the exit code."""
    default = DevicesOptions()
    options = parse_options(default, arguments, program=_PROGRAM, description=_HELP)
    if options.ssh is not None:
        return _hosts(options.ssh, options.output)
    if options.output is not None:
        raise BadInput(
            got="--output without --ssh",
            allowed="--output with --ssh HOSTS.toml",
            fix="add --ssh, or leave --output out",
        )
    found = meant(options.word)
    here = None if options.word else _here()
    if options.json:
        listed = {spec.name: _values(spec) for spec in found}
        print(json.dumps({"devices": listed, "here": here}))
        return 0
    print(
        _ROW.format(
            "device", "memory GiB", "TFLOP/s", "watts", "USD an hour", "USD if spot"
        )
    )
    for spec in found:
        print(_ROW.format(spec.name, *map(_cell, _values(spec).values())))
    if here is not None:
        counts = ", ".join(f"{count} x {name}" for name, count in here.items())
        print(f"\nthis machine: {counts or 'no accelerator, only the CPU'}")
    return 0


def meant(word: str) -> list[DeviceSpec]:
    """Return the devices that a word may mean, then those whose names contain it."""
    specs, text = catalogue(), word.lower()
    names = candidates(word) if word else list(specs)
    holding = [name for name in specs if text in name.lower()]
    if not (names or holding):
        raise BadInput(
            got=f"no device {word!r}",
            allowed="a name of the device catalogue, or a part of one",
            fix="hetjax devices lists all; a cluster file may describe others",
        )
    return [specs[name] for name in dict.fromkeys([*names, *holding])]


def _values(spec: DeviceSpec) -> dict[str, Any]:
    return {
        "memory_gib": spec.memory_gib,
        "peak_tflops": spec.peak_tflops,
        "watts": spec.watts,
        "price_per_hour": spec.price_per_hour,
        "spot_price_per_hour": spec.spot_price_per_hour,
    }


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _here() -> Mapping[str, int]:
    """Return the number of accelerators of each kind on this machine."""
    with working("looking"):
        from hetjax.cluster.discovery import discover
        from hetjax.launchers.device_probe import accelerators_here

        here = accelerators_here(os.environ)
    nodes = discover(here).nodes if here else ()
    return {node.device: node.count for node in nodes}


def _hosts(file: Path, output: Path | None) -> int:
    """Probe the hosts of a file; write or print their cluster file.

    Return 1 if it lacks hosts, so that a script does not continue without them.
    """
    with working("looking"):
        from hetjax.diagnosis.hosts_by_ssh import look_at_hosts

        found = look_at_hosts(file)
    text = cluster_toml(found.cluster)
    kinds = [
        f"{node.name}: {node.count} x {node.device}" for node in found.cluster.nodes
    ]
    lines = [*kinds, *found.ways]
    if found.missing:
        lines.append(f"not in the cluster file: {', '.join(found.missing)}")
    if output is None:
        print(text, *(f"# {line}" for line in lines), sep="\n")
    else:
        write_file(output, text, "--output")
        print(*lines, f"cluster file: {output}", sep="\n")
    return 1 if found.missing else 0


main = main_of(devices)
