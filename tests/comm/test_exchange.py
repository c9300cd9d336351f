# SPDX-License-Identifier: Apache-2.0
"""Sums over workers: numpy's sums, and the same bits for every holder."""

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from hetjax.comm.peers import Peers
from hetjax.comm.reduction import total
from hetjax.costs.network.wire_bytes import GradientWire, exchanged

NAMES = ("a", "b", "c", "d")
WIRES: dict[type, GradientWire] = {
    np.float32: "float32",
    ml_dtypes.bfloat16: "bfloat16",
}


@pytest.fixture(scope="module")
def four() -> Iterator[dict[str, Peers]]:
    secret = secrets.token_bytes(32)
    peers = {name: Peers(name, "127.0.0.1:0", secret) for name in NAMES}
    with ThreadPoolExecutor(4) as pool:
        others = {
            name: {n: p.address for n, p in peers.items() if n != name}
            for name in NAMES
        }
        list(pool.map(lambda name: peers[name].connect(others[name], 5.0), NAMES))
    yield peers
    for found in peers.values():
        found.close()


@pytest.mark.parametrize("wire", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", [1, 3, 1000, 200_001])
@pytest.mark.parametrize("holders", [("b", "a"), ("d", "a", "c"), NAMES])
def test_the_sum_is_that_of_all_holders_and_equal_to_the_last_bit(
    four: dict[str, Peers], holders: tuple[str, ...], size: int, wire: type
):
    rng = np.random.default_rng(size)
    own = {h: rng.standard_normal(size).astype(np.float32) for h in holders}
    number = NAMES.index(holders[0]), 2 * len(holders) + (wire == np.float32), size
    before = {name: peers.sent.by_link_and_kind() for name, peers in four.items()}
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(
                total, four[h], holders, (*number, 0, 0, 0), own[h], np.dtype(wire)
            )
            for h in holders
        ]
        sums = [job.result(timeout=20) for job in jobs]
    for a, b, num_bytes in exchanged(len(holders), size, WIRES[wire]):
        link = holders[b], size
        sent = four[holders[a]].sent.by_link_and_kind()[link]
        assert sent - before[holders[a]].get(link, 0) == num_bytes
    expected = np.zeros(size, np.float32)
    for holder in holders:
        expected = expected + own[holder].astype(wire).astype(np.float32)
    for found in sums:
        np.testing.assert_array_equal(found, sums[0])
        assert found.dtype == np.float32
    if wire == np.float32:
        np.testing.assert_array_equal(sums[0], expected)
    else:  # partial sums are rounded once more on the way back
        np.testing.assert_allclose(sums[0], expected, rtol=2**-8, atol=1e-6)


def test_many_sums_may_be_under_way_at_once(four: dict[str, Peers]):
    own = {name: np.full(100_000, n, np.float32) for n, name in enumerate(NAMES)}
    with ThreadPoolExecutor(40) as pool:
        jobs = [
            pool.submit(total, four[name], NAMES, (9, 9, 9, key, 0, 0), own[name])
            for name in NAMES
            for key in (range(10) if name < "c" else reversed(range(10)))
        ]
        assert {float(job.result(timeout=20)[-1]) for job in jobs} == {6.0}
