# SPDX-License-Identifier: Apache-2.0
"""Arrays come back from another process as they were, by either transport."""

import json
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from experiments.gpu.claims import CLAIMS
from experiments.gpu.parts import transports
from experiments.gpu.rows import Row
from experiments.gpu.setting import Setting
from experiments.gpu.two_processes import TRANSPORTS
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


def answers(*are_equal: bool) -> bytes:
    return b"".join(
        json.dumps({"num_bytes": n, "seconds": 1e-3, "are_equal": is_equal}).encode()
        + b"\n"
        for n, is_equal in zip(SIZES, are_equal, strict=False)
    )


def between(monkeypatch: pytest.MonkeyPatch, outcome: Any) -> list[Row]:
    """The rows of a transport whose processes end in this way."""

    def run(*_: Any, **__: Any) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(transports.subprocess, "run", run)
    return [*transports._between_processes(QUICK, "sockets", SIZES, NODE)]


def test_an_array_that_comes_back_changed_is_told(monkeypatch: pytest.MonkeyPatch):
    done = subprocess.CompletedProcess("", 0, answers(True, False), b"")
    assert between(monkeypatch, done)[0].measured is False


def test_a_transport_that_hangs_says_so_and_keeps_what_had_arrived(
    monkeypatch: pytest.MonkeyPatch,
):
    late = subprocess.TimeoutExpired("", 60.0, output=answers(True))
    works, *rates = between(monkeypatch, late)
    assert works.measured is False and "no end within 60 s" in works.note
    assert [row.what for row in rates] == ["sockets between two processes, 0.0625 MiB"]


def test_a_transport_that_fails_says_why(monkeypatch: pytest.MonkeyPatch):
    failed = subprocess.CompletedProcess("", 1, b"", b"UNIMPLEMENTED: no such thing")
    (works,) = between(monkeypatch, failed)
    assert works.measured is False and "UNIMPLEMENTED" in works.note
