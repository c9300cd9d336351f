# SPDX-License-Identifier: Apache-2.0
"""Turns the answers of a launcher's machines into findings.

Pure functions. Owns the thresholds and the texts. Does not own a machine's findings
about itself (`checks.py`) nor the queries (`machines.py`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from hetjax.diagnosis.checks import clock_off
from hetjax.diagnosis.facts import Machines, OtherMachine
from hetjax.errors import listed
from hetjax.report.diagnosis import Finding

_LEAST_MEMORY_GIB = 4.0  # JAX and hetjax take about 1 GiB, a small model's state 1 more
_MOST_NAMES = 8  # in one row


def findings_of_machines(found: Machines) -> tuple[Finding, ...]:
    """Return the findings on all machines, the unreachable ones first.

    Machines with the same finding share a row.
    """
    absent = (_problem("machines", why, fix) for why, fix in found.absent)
    there = (
        (finding, machine.name)
        for machine in found.machines
        for finding in _machine(machine, found.versions)
    )
    return (*absent, *_named(there))


def _named(findings: Iterable[tuple[Finding, str]]) -> Iterator[Finding]:
    names: dict[Finding, list[str]] = {}
    for finding, name in findings:
        names.setdefault(finding, []).append(name)
    for finding, machines in names.items():
        whose = listed(machines, most=_MOST_NAMES)
        yield replace(finding, found=f"{whose}: {finding.found}")


def _machine(machine: OtherMachine, here: Mapping[str, str]) -> Iterator[Finding]:
    if machine.error is not None:
        why = f"no report: {machine.error}"
        yield _problem("machines", why, _fix_of_silence(machine.error))
        return
    yield from machine.findings
    yield from _cards(machine)
    yield from _versions(machine, here)
    yield from _memory(machine)
    yield from _way(machine)
    if not machine.sees_run_dir:
        yield Finding(
            check="run directory",
            level="warning",
            found="cannot see the run directory: would keep checkpoints on its own "
            "disk, and get text and weights from this machine",
            fix="give a --run-dir in a folder that all machines share under one path; "
            "if there is none, change nothing (but a Slurm job that is requeued may "
            "start on a node without this disk)",
        )
    elif not machine.writes_run_dir:
        yield _problem(
            "run directory",
            "sees the run directory and cannot write there",
            "give a --run-dir in a folder that all machines can write to: many "
            "clusters mount home directories read-only on compute nodes",
        )


def _fix_of_silence(error: str) -> str:
    if any(word in error.lower() for word in ("oom", "out of memory")):
        return (
            f"request {_LEAST_MEMORY_GIB:.0f} GiB or more, with Slurm's --mem for "
            "instance"
        )
    return (
        "install hetjax there, at the path of this Python or of the one in the hosts' "
        "file; then type there: python -m hetjax.doctor"
    )


def _cards(machine: OtherMachine) -> Iterator[Finding]:
    """Compare what the machine's system grants with what JAX finds there."""
    number = sum(count for _, count in machine.granted)
    if machine.cards < number:
        kinds = " and ".join(f"{count} x {kind}" for kind, count in machine.granted)
        yield _problem(
            "devices",
            f"this job has {kinds} there, JAX finds {machine.cards}",
            "type there: nvidia-smi -L (rocm-smi for AMD's), then python -m "
            "hetjax.doctor; with --simulate, change nothing",
        )


def _versions(machine: OtherMachine, here: Mapping[str, str]) -> Iterator[Finding]:
    """Compare versions: programs, messages and saved state belong to one version."""
    for package, version in here.items():
        there = machine.versions.get(package, "missing")
        if there == version:
            continue
        differs = f"{package} {there}, on this machine {version}"
        if package == "Python":
            yield Finding(
                check="versions",
                level="warning",
                found=differs,
                fix=f"create its environment with Python {version} as well",
            )
        else:
            fix = f"type there: pip install '{package}=={version}'"
            if package == "hetjax":  # which is on no index
                fix = f"install hetjax {version} there, as on this machine"
            yield _problem("versions", differs, fix)


def _memory(machine: OtherMachine) -> Iterator[Finding]:
    memory = f"{machine.memory_gib:.1f} GiB of memory"
    if not machine.memory_gib or machine.memory_gib >= _LEAST_MEMORY_GIB:
        yield Finding(check="memory", level="ok", found=memory)
        return
    yield Finding(
        check="memory",
        level="warning",
        found=f"{memory} within the limit of its job or container",
        fix=f"request {_LEAST_MEMORY_GIB:.0f} GiB or more, with Slurm's --mem for "
        "instance",
    )


def _way(machine: OtherMachine) -> Iterator[Finding]:
    way = machine.way
    if way.error is not None:
        yield _problem(
            "links",
            f"cannot reach this machine at {way.address}: {way.error}",
            "open firewalls between the machines, on all ports; if this machine has "
            "another address there, give it as `controller` in the file of hosts",
        )
        return
    figures = f"{way.gbit_per_s:.3g} Gbit/s, {way.latency_ms:.2f} ms"
    yield Finding(check="links", level="ok", found=figures)
    # `way` says how far this machine's clock is ahead of the other one's
    yield from clock_off("the clock", -way.clock_ahead_s)


def _problem(check: str, found: str, fix: str) -> Finding:
    return Finding(check=check, level="problem", found=found, fix=fix)
