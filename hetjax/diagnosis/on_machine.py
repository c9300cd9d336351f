# SPDX-License-Identifier: Apache-2.0
"""`python -m hetjax.diagnosis.on_machine FILE`: checks a machine of a run.

Runs on the machine itself and prints a line of JSON: its findings, versions, memory,
its cards, and whether it sees FILE, which lies in the run directory (empty: not
checked), and can write beside it. Owns both ends of that line. Does not own how to
reach a machine (`machines.py`).
"""

import json
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryFile
from typing import get_args

from hetjax.diagnosis.checks import diagnosis
from hetjax.diagnosis.facts import OtherMachine, Peer
from hetjax.diagnosis.gathering import Scope, gather
from hetjax.files.parsing import json_value
from hetjax.files.tables import Kind, as_kind, read_fields, read_record
from hetjax.report.diagnosis import Finding, Level

_MARK = "hetjax machine: "  # libraries print, too
_ALIKE = ("hetjax", "jax", "jaxlib")
_LINE: dict[str, Kind] = {
    "findings": "a list",
    "versions": "a table",
    "memory_gib": "a number",
    "cards": "an integer",
    "sees_run_dir": "true or false",
    "writes_run_dir": "true or false",
}


def versions_here() -> dict[str, str]:
    """Return the versions that must be the same on all machines of a run."""
    found: dict[str, str] = {}
    for name in _ALIKE:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found | {"Python": ".".join(platform.python_version_tuple()[:2])}


def line_of_this_machine(file_of_run: str) -> str:
    """Check this machine; return the line with the results."""
    facts = gather(Scope())
    found = diagnosis(facts)
    devices = facts.started.devices
    sees = not file_of_run or Path(file_of_run).exists()
    answer = {
        "findings": [asdict(finding) for finding in found.findings],
        "versions": versions_here(),
        "memory_gib": memory_gib(),
        "cards": sum(seen.count for seen in devices if seen.platform != "cpu"),
        "sees_run_dir": sees,
        "writes_run_dir": not (file_of_run and sees) or writes_beside(file_of_run),
    }
    return _MARK + json.dumps(answer)


def writes_beside(file: str) -> bool:
    """Return whether a file can be created in the folder of this one."""
    try:
        with TemporaryFile(dir=Path(file).parent, prefix=".hetjax-doctor-"):
            return True
    except OSError:
        return False


def read_machine(name: str, printed: str, way: Peer) -> OtherMachine | None:
    """Read the output of a machine; return None if it has no line of ours.

    Raises BadInput or ValueError if a line begins like ours and is malformed.
    """
    lines = [line for line in printed.splitlines() if line.startswith(_MARK)]
    if not lines:
        return None
    raw = json_value(lines[-1].removeprefix(_MARK))
    answer = read_record(raw, where=name, required=_LINE)
    for key, number in answer["versions"].items():
        as_kind(number, "a string", where=f"{name}.versions.{key}")
    return OtherMachine(
        name=name,
        findings=tuple(_finding(each, name) for each in answer["findings"]),
        versions=answer["versions"],
        memory_gib=answer["memory_gib"],
        cards=answer["cards"],
        sees_run_dir=answer["sees_run_dir"],
        writes_run_dir=answer["writes_run_dir"],
        way=way,
    )


def _finding(raw: object, where: str) -> Finding:
    fields = read_fields(raw, Finding, where=where)
    level = fields.pop("level")
    return Finding(level=level if level in get_args(Level) else "problem", **fields)


def memory_gib(root: Path = Path("/")) -> float:
    """Return how much memory processes here may use: the machine's, or a lower limit.

    The limit of a container or of a Slurm step is that of its control group or of a
    group above it. Returns 0.0 if unknown.
    """
    found = [*_physical_bytes(root), *_group_limits_bytes(root)]
    return min(found, default=0) / 2**30


def _physical_bytes(root: Path) -> Iterator[int]:
    for words in map(str.split, _lines(root / "proc/meminfo")):
        if words[:1] == ["MemTotal:"]:
            yield int(words[1]) * 1024


def _group_limits_bytes(root: Path) -> Iterator[int]:
    """Yield the limits of cgroup v2, and of v1, which many clusters still have."""
    for line in _lines(root / "proc/self/cgroup"):
        _, kinds, group = line.split(":", 2)
        if not kinds:
            top, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in kinds.split(","):
            top, file = root / "sys/fs/cgroup" / kinds, "memory.limit_in_bytes"
        else:
            continue
        own = top / group.removeprefix("/")
        for folder in [own, *own.parents]:
            limit = _lines(folder / file)[:1]
            yield from (int(each) for each in limit if each.isdecimal())
            if folder == top:
                break


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


if __name__ == "__main__":
    print(line_of_this_machine(sys.argv[1]), flush=True)
