# SPDX-License-Identifier: Apache-2.0
"""Arrays return unchanged from another process, by either transport."""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from experiments.gpu.claims import CLAIMS
from experiments.gpu.parts import transports
from experiments.gpu.processes.two_processes import TRANSPORTS
from experiments.gpu.rows import Row
from experiments.gpu.setting import Setting
from hetjax.cluster.cluster import Node

QUICK = Setting(platform="cpu", quick=True)
SIZES = 1 << 16, 1 << 20
NODE = Node(name="node", device="cpu", count=1)


@pytest.fixture(scope="module")
def rows() -> Mapping[str, Row]:
    return {row.what: row for row in transports.measure(QUICK)}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_sent_arrives_at_a_rate(rows: Mapping[str, Row], transport: str):
    assert rows[transports.works(transport)].measured is True
    found = [row for row in rows.values() if row.unit]
    way = transports.works(transport).partition(":")[0]
    mine = [row for row in found if row.what.startswith(f"{way}, ")]
    assert [row.what for row in mine] == [f"{way}, 0.0625 MiB", f"{way}, 1 MiB"]
    for row, num_bytes in zip(mine, SIZES, strict=True):
        # 10 Gbit/s of a CPU's host, and 20 us from host to host
        expected = num_bytes / (20e-6 + num_bytes / 1.25e9) / 1e9
        assert row.predicted == pytest.approx(expected)


def test_devices_of_a_process_pass_arrays_by_their_own_links(
    rows: Mapping[str, Row],
):
    found = [row for what, row in rows.items() if what.startswith("device to device")]
    for row, num_bytes in zip(found, SIZES, strict=True):
        expected = num_bytes / (5e-6 + num_bytes / 5e9) / 1e9
        assert row.predicted == pytest.approx(expected)
        assert row.measured and not row.note


def test_every_claim_is_decided_by_a_row(rows: Mapping[str, Row]):
    wanted = {claim.what for claim in CLAIMS if claim.part == "transports"}
    assert len(wanted) == 2 and wanted <= rows.keys()


def told(*are_equal: bool) -> list[dict[str, Any]]:
    """Return what two processes print after this many turns."""
    turns = [(transport, size) for transport in TRANSPORTS for size in SIZES]
    return [
        {"transport": transport, "num_bytes": n, "seconds": 1e-3, "are_equal": is_equal}
        for (transport, n), is_equal in zip(turns, are_equal, strict=False)
    ]


def verdicts(
    printed: list[dict[str, Any]], why: str, is_late: bool = False
) -> list[Row]:
    rows = transports.between_processes(printed, why, is_late, SIZES, NODE)
    return [row for row in rows if not row.unit]


def test_an_array_that_comes_back_changed_is_told():
    sockets, transfer = verdicts(told(True, True, True, False), "")
    assert sockets.measured is True and transfer.measured is False


def test_a_transport_that_ends_early_does_not_work_and_says_why():
    sockets, transfer = verdicts(told(True, True, True), "UNIMPLEMENTED: no such thing")
    assert sockets.measured is True and transfer.measured is False
    assert "UNIMPLEMENTED" in transfer.note


def test_a_transport_that_had_no_time_is_not_judged():
    sockets, transfer = verdicts(told(True, True, True), "no end", is_late=True)
    assert sockets.measured is True and not sockets.note
    assert transfer.measured is None and transfer.note == "no end"
    changed, _ = verdicts(told(True, False), "no end", is_late=True)
    assert changed.measured is False


def process(code: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_what_hangs_is_ended_and_what_it_had_printed_is_kept():
    line = json.dumps(told(True)[0])
    hangs = process(f"import time; print('{line}', flush=True); time.sleep(600)")
    found, why, is_late = transports.ended(hangs, 5.0)
    assert found == told(True) and why == "no end within 5 s" and is_late
    assert hangs.poll() is not None


def test_what_fails_says_why():
    fails = process("raise ValueError('no such port')")
    found, why, is_late = transports.ended(fails, 60.0)
    assert found == [] and "no such port" in why and not is_late
