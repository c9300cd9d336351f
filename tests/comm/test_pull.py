# SPDX-License-Identifier: Apache-2.0
"""Transfers between processes by pull: ids, pieces, equal bits, and lost peers."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.comm.pull import PullServer, check_fits, offer_id, row_ranges
from hetjax.comm.transport import Tag
from hetjax.errors import BadInput

SECRET = bytes(range(32))
SILENCE_S = 4.0  # of a stopped peer
ROUNDS = 20
FIELDS = {  # bits, from the highest
    "generation": 8,
    "step": 16,
    "kind": 1,
    "replica": 12,
    "stage": 11,
    "microbatch": 16,
}

steps = count()


def tags() -> st.SearchStrategy[Tag]:
    numbers = [st.integers(0, 2**bits - 1) for bits in FIELDS.values()]
    kinds = st.sampled_from("FB")
    return st.builds(Tag, *numbers[:2], kinds, *numbers[3:])  # pyright: ignore


def decoded(found: int, secret: bytes) -> tuple[Any, ...]:
    """Return an id's tag: the network's rounds backwards, then field by field."""
    left, right = found >> 32, found & (2**32 - 1)
    for turn in (3, 2, 1, 0):
        hashed = hashlib.blake2b(
            left.to_bytes(4, "big"), digest_size=4, key=secret, salt=bytes([turn])
        )
        left, right = right ^ int.from_bytes(hashed.digest(), "big"), left
    bits = f"{left:032b}{right:032b}"
    numbers = []
    for width in FIELDS.values():
        numbers.append(int(bits[:width], 2))
        bits = bits[width:]
    numbers[2] = "FB"[numbers[2]]
    return tuple(numbers)


@given(tags(), st.binary(min_size=1, max_size=64))
def test_an_id_has_64_bits_and_whoever_knows_the_secret_can_read_the_tag(
    tag: Tag, secret: bytes
):
    found = offer_id(tag, secret)
    assert 0 <= found < 2**64
    assert decoded(found, secret) == astuple(tag)


@given(st.sets(tags(), min_size=2, max_size=30))
def test_distinct_tags_have_distinct_ids(tags: set[Tag]):
    assert len({offer_id(tag, SECRET) for tag in tags}) == len(tags)


@given(tags(), st.binary(min_size=16, max_size=32))
def test_another_secret_gives_other_ids(tag: Tag, secret: bytes):
    other = bytes([secret[0] ^ 1]) + secret[1:]
    assert offer_id(tag, secret) != offer_id(tag, other)


def test_neighbouring_tags_have_ids_that_differ_in_about_half_of_their_bits():
    ids = [offer_id(Tag(1, 7, "F", 0, 1, m), SECRET) for m in range(1000)]
    differing = [(a ^ b).bit_count() / 64 for a, b in zip(ids, ids[1:], strict=False)]
    assert 0.49 < sum(differing) / len(differing) < 0.51


def test_generations_and_steps_may_count_on_beyond_their_bits():
    low, high = Tag(3, 5, "B", 1, 2, 4), Tag(3 + 256, 5 + 65536, "B", 1, 2, 4)
    assert offer_id(low, SECRET) == offer_id(high, SECRET)


def test_plans_that_fit_the_ids_pass_and_others_are_refused_in_three_parts():
    check_fits(num_replicas=4096, num_stages=2048, num_microbatches=65536)
    for sizes, told in [
        ((4097, 1, 1), "4097 replicas"),
        ((1, 2049, 1), "2049 stages"),
        ((1, 1, 65537), "65537 microbatches"),
    ]:
        names = ("num_replicas", "num_stages", "num_microbatches")
        with pytest.raises(BadInput) as refused:
            check_fits(**dict(zip(names, sizes, strict=True)))
        assert told in refused.value.got
        assert str(max(sizes) - 1) in refused.value.allowed
        assert refused.value.fix


@given(st.integers(1, 6), st.lists(st.integers(1, 8), min_size=2, max_size=2))
def test_pieces_are_cut_where_one_side_cuts_and_nowhere_else(
    factor: int, degrees: list[int]
):
    num_rows = factor * degrees[0] * degrees[1]
    ranks = [[row * d // num_rows for d in degrees] for row in range(num_rows)]
    cuts = [r for r in range(1, num_rows) if ranks[r] != ranks[r - 1]]
    expected = zip([0, *cuts], [*cuts, num_rows], strict=True)
    assert row_ranges(num_rows, *degrees) == tuple(expected)


@pytest.mark.parametrize("host", ["0.0.0.0", ""])
def test_a_server_on_all_interfaces_is_refused(host: str):
    with pytest.raises(BadInput, match="all interfaces"):
        PullServer(host, SECRET)


class Process:
    """One side, in its own process."""

    def __init__(self, name: str, silence_s: float) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "tests.comm.pull_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._write([name, SECRET.hex(), silence_s])

    def begin(self, command: str, **arguments: Any) -> None:
        self._write([command, arguments])

    def end(self) -> Any:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, f"ended with {self.child.wait()}: see its standard error"
        return json.loads(line)

    def do(self, command: str, **arguments: Any) -> Any:
        self.begin(command, **arguments)
        return self.end()

    def leave(self) -> int:
        """Return the exit status of a side that has nothing left to do."""
        self.do("leave")
        assert self.child.stdin is not None
        self.child.stdin.close()
        return self.child.wait(10)

    def stop(self) -> None:
        self.child.kill()
        self.child.wait()
        for stream in (self.child.stdin, self.child.stdout):
            assert stream is not None
            stream.close()

    def _write(self, message: Any) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(message) + "\n")
        self.child.stdin.flush()


@contextmanager
def started(*names: str, silence_s: float = 30.0) -> Iterator[list[Process]]:
    with ExitStack() as stack:
        processes = [Process(name, silence_s) for name in names]
        for process in processes:
            stack.callback(process.stop)
        yield processes


def join(east: Process, west: Process, generation: int = 0) -> None:
    addresses = [side.do("listen", generation=generation) for side in (east, west)]
    both("connect", east, west, [{"address": address} for address in addresses[::-1]])


def both(command: str, east: Process, west: Process, arguments: Any) -> list[Any]:
    for side, given_ in zip((east, west), arguments, strict=True):
        side.begin(command, **given_)
    return [east.end(), west.end()]


@pytest.fixture(scope="module")
def sides() -> Iterator[list[Process]]:
    with started("east", "west") as processes:
        east, west = processes
        join(east, west)
        yield processes
        assert [side.leave() for side in processes] == [0, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_both_ways_arrays_come_with_equal_bits_whatever_the_degrees(
    sides: list[Process], degrees: tuple[int, int], dtype: str
):
    case = dict(degrees=degrees, dtype=dtype, rounds=ROUNDS, step=next(steps))
    east, west = sides
    both("exchange", east, west, [case, case])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_lost_during_pulls_is_told_and_the_survivor_goes_on_with_another(
    how: signal.Signals,
):
    silence_s = {signal.SIGKILL: 30.0, signal.SIGSTOP: SILENCE_S}[how]
    with started("east", "west", "west", silence_s=silence_s) as (east, west, spare):
        join(east, west)
        west.begin("offer", rounds=3)
        east.do("arrivals", rounds=3)
        west.child.send_signal(signal.SIGSTOP)  # what it offered does not come
        stopped_s = time.monotonic()
        east.do("pull", rounds=3)
        west.child.send_signal(how)
        begin_s = time.monotonic() if how == signal.SIGKILL else stopped_s + SILENCE_S
        peer, told_s, failed_s = east.do("loss")
        assert peer == "west"
        assert told_s - begin_s < 2.0
        # waits for a device end too, long before the silence limit alone would end them
        assert failed_s - told_s < SILENCE_S / 2
        east.do("leave")
        join(east, spare, generation=1)
        case = dict(degrees=(1, 2), dtype="float32", rounds=2, step=0)
        both("exchange", east, spare, [case, case])
        assert [east.leave(), spare.leave()] == [0, 0]
