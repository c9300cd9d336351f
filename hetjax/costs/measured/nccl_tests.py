# SPDX-License-Identifier: Apache-2.0
"""Reads the output of NCCL-tests: from a table of sums to a ring's rate and latency.

`all_reduce_perf` and similar tests print their devices, and then the times of messages
of several sizes. RCCL-tests print the same. Owns the reading. Does not own the
conclusions about a device (`costs/certainty/chosen.py`).
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.ranges import RATE
from hetjax.errors import BadInput

MARK = "busbw"  # a column of every table, and in no file of ours
_SUMS = ("all_reduce_perf", "reduce_scatter_perf", "all_gather_perf")
_FIX = "give the whole output of one run: all_reduce_perf -b 1M -e 1G -f 2 -g 8"
_RANK = re.compile(
    r"#\s*Rank\s+(?P<rank>\d{1,9})\s.*?\bon\s+(?P<host>\S+)\s+device\s+\d+\s+"
    r"\[[^\]]*\]\s+(?P<device>\S.*?)\s*$"
)
_TAG = re.compile(r"^(\[[\d,]+\]<\w+>:)?\s*")  # mpirun puts it before lines
_STARTING = re.compile(r"#\s*Collective test starting:\s*(\w+)")
_MOST_LINES, _MOST_RANKS = 100_000, 65_536
_LONGEST = 500  # characters of a line
_RANGE = 64.0  # of sizes in the fit of a rate: NCCL sends smaller ones differently
_NEAR = 0.03  # tolerance of the share of bytes that a collective sends
_UNKNOWN = "N/A"  # for unchecked results


@dataclass(frozen=True, kw_only=True, slots=True)
class RingMeasurement:
    """A ring over devices of one kind: the bytes per second from one device to the
    next, and the time of a sum without bytes. `misfit` is the standard deviation of the
    logarithms of measured times from this model."""

    device: str
    num_devices: int
    num_hosts: int
    bytes_per_s: float
    latency_s: float
    misfit: float


@dataclass(frozen=True, slots=True)
class _Row:
    size: float
    seconds: float
    algorithm_rate: float
    bus_rate: float
    num_wrong: str


def parse_nccl_tests(text: str) -> RingMeasurement:
    """Read the output of a test; BadInput says what is wrong with it."""
    lines = [_TAG.sub("", line[:_LONGEST], count=1) for line in text.splitlines()]
    if len(lines) > _MOST_LINES:
        raise _bad(f"{len(lines):,} lines", f"up to {_MOST_LINES:,}")
    device, num_devices, num_hosts = _devices(lines)
    _check_collective(lines)
    rows = sorted(_rows(lines), key=lambda row: row.size)
    if not rows:
        raise _bad("a table without times", "a line with size, time, algbw and busbw")
    share = _share(rows[-1], num_devices)
    large = [row for row in rows if row.size * _RANGE >= rows[-1].size]
    bytes_N = np.array([share * row.size for row in large])
    rate, latency_s, misfit = _fitted(bytes_N, np.array([r.seconds for r in large]))
    if not RATE.has(rate / 1e9):
        raise _bad(f"{rate / 1e9:g} GB/s", RATE.allowed("GB/s"))
    return RingMeasurement(
        device=device,
        num_devices=num_devices,
        num_hosts=num_hosts,
        bytes_per_s=rate,
        latency_s=latency_s,
        misfit=misfit,
    )


def _devices(lines: Sequence[str]) -> tuple[str, int, int]:
    """Return the kind of device, the number of devices, and the number of hosts."""
    found = [match for line in lines if (match := _RANK.match(line))]
    ranks = [int(match["rank"]) for match in found]
    if not found:
        raise _bad("no line '# Rank 0 ... on HOST device 0 [...] NAME'", "one per GPU")
    if len(found) < 2 or len(found) > _MOST_RANKS:
        raise _bad(f"{len(found)} ranks", f"2 to {_MOST_RANKS:,}")
    if ranks != [*range(len(ranks))]:
        shown = ", ".join(map(str, ranks[:12]))
        raise _bad(f"ranks {shown}", f"0 to {len(ranks) - 1}, once each")
    kinds = sorted({canonical_name(match["device"]) for match in found})
    if len(kinds) > 1:
        raise _bad(f"devices {', '.join(kinds)}", "devices of one kind")
    return kinds[0], len(found), len({match["host"] for match in found})


def _check_collective(lines: Sequence[str]) -> None:
    """Raise BadInput for a wrong collective; only newer tests print which it is."""
    for line in lines:
        started = _STARTING.match(line)
        if started and not started[1].startswith(_SUMS):
            raise _bad(started[1], f"one of {', '.join(_SUMS)}")


def _rows(lines: Sequence[str]) -> Iterator[_Row]:
    """Yield the table's rows; the names above the columns identify these."""
    columns: list[str] = []
    for line in lines:
        words = line.replace("#wrong", "wrong").lstrip("# ").split()
        if "size" in words and MARK in words and "time" in words:
            columns = words
        elif columns and not line.startswith("#") and len(words) == len(columns):
            yield _row(words, columns)


def _row(words: Sequence[str], columns: Sequence[str]) -> _Row:
    named: dict[str, str] = {}
    for name, word in zip(columns, words, strict=True):
        named.setdefault(name, word)  # the out-of-place columns come first
    size, time_us, algorithm, bus = (
        _number(named.get(name), name) for name in ("size", "time", "algbw", MARK)
    )
    wrong = named.get("wrong", named.get("error", _UNKNOWN))
    if wrong != _UNKNOWN and _number(wrong, "#wrong") >= 1:
        raise _bad(f"{wrong} wrong results at size {words[0]}", "none")
    return _Row(size, time_us / 1e6, algorithm, bus, wrong)


def _number(word: str | None, name: str) -> float:
    try:
        value = float(word or "")
    except ValueError:
        value = math.nan
    if not 0 <= value < 1e18:
        raise _bad(f"{name} = {(word or 'nothing')[:40]!r}", "numbers from 0")
    return value


def _share(largest: _Row, num_devices: int) -> float:
    """Return the share of the size that leaves every device: the ratio of the rates."""
    if not (largest.seconds and largest.algorithm_rate and largest.bus_rate):
        raise _bad(f"a rate of 0 at size {largest.size:.0f}", "rates above 0")
    found = largest.bus_rate / largest.algorithm_rate
    of_ring = (num_devices - 1) / num_devices
    for share in (2 * of_ring, of_ring):
        if abs(found / share - 1) < _NEAR:
            return share
    raise _bad(
        f"busbw / algbw = {found:.3g} with {num_devices} ranks",
        f"{2 * of_ring:.3g} or {of_ring:.3g}, as {', '.join(_SUMS)} have",
    )


def _fitted(bytes_N: np.ndarray, seconds_N: np.ndarray) -> tuple[float, float, float]:
    """Fit latency + bytes / rate by least squares, relative to the measured times."""
    if not (seconds_N > 0).all() or not (bytes_N > 0).all():
        raise _bad("a size or time of 0", "sizes and times above 0")
    if len(bytes_N) < 2:
        return float(bytes_N[0] / seconds_N[0]), 0.0, 0.0
    columns_NP = np.stack([1 / seconds_N, bytes_N / seconds_N], axis=1)
    latency_s, per_byte = np.linalg.lstsq(columns_NP, np.ones(len(bytes_N)))[0]
    if latency_s < 0 or per_byte <= 0:  # no latency is visible
        scaled_N = bytes_N / seconds_N
        latency_s, per_byte = 0.0, scaled_N.sum() / (scaled_N**2).sum()
    off_N = np.log((latency_s + bytes_N * per_byte) / seconds_N)
    misfit = float(np.sqrt((off_N**2).mean()))
    return float(1 / per_byte), float(latency_s), misfit


def _bad(got: str, allowed: str) -> BadInput:
    return BadInput(got=f"NCCL-tests output with {got}", allowed=allowed, fix=_FIX)
