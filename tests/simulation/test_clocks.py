# SPDX-License-Identifier: Apache-2.0
"""The protocol uses no wall clock, which people set and which may jump.

Hence simulated runs have no such clock, either.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import hetjax

ROOMS = ("runtime", "training/recovery", "checkpoint", "comm", "training/loop.py")
ROOMS += (
    "training/directory/leases.py",
    "training/directory/leftover_checkpoints.py",
    "training/directory/rundir.py",
)
JUMPING = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"}
JUMPING |= {"time.localtime", "time.gmtime", "date.today", "os.path.getmtime"}
EXCUSED = {
    # The time at which a cloud takes a machine away, if its answer has no date
    "training/recovery/notice_sources.py": {"datetime.now"},
    # The time at which obstore renews credentials, in the only form that it accepts
    "checkpoint/stores/s3_login.py": {"datetime.now"},
}


def python_files(house: Path, room: str) -> list[Path]:
    place = house / room
    return [place] if place.suffix else sorted(place.rglob("*.py"))


def clocks_read(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in JUMPING:
            yield ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "os.path"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from names & JUMPING


def test_nothing_that_decides_reads_a_clock_that_jumps():
    house = Path(hetjax.__file__).parent
    found = {
        str(path.relative_to(house)): {*clocks_read(path.read_text())}
        for room in ROOMS
        for path in python_files(house, room)
    }
    assert len(found) > 80
    assert {path: read for path, read in found.items() if read} == EXCUSED


def test_a_clock_that_jumps_is_seen():
    assert [*clocks_read("import time\nx = time.time() + 1")] == ["time.time"]
    assert [*clocks_read("from time import time")] == ["time.time"]
    assert [*clocks_read("import time\nx = time.monotonic()")] == []
