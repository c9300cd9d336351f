# SPDX-License-Identifier: Apache-2.0
"""Hops between unplaced stages, in closed form."""

from dataclasses import replace

import numpy as np
import pytest

from hetjax.cluster.cluster import Cluster, Link, Node, Precision
from hetjax.costs.stage_memory import hidden_size
from hetjax.planner.model.hops import hop_tables
from hetjax.planner.model.request import PlanRequest
from hetjax.planner.model.terms.terms import options_of
from tests.planner.whole_space import two_kinds

LINK_S_PER_BYTE, LATENCY_S = 8 / 0.1e9, 0.002


def request_of(fast: Precision, slow: Precision) -> PlanRequest:
    """Return two nodes on a slow link, each with its own best precision."""
    request = two_kinds(dtype=None, data_degrees=(1,), microbatch_sizes=(1, 2))
    one, other = request.cluster.nodes
    nodes: tuple[Node, ...] = (
        replace(one, count=1, precision=fast),
        replace(other, count=1, precision=slow),
    )
    link = Link(
        between=(one.name, other.name),
        bandwidth_gbit_per_s=0.1,
        latency_ms=LATENCY_S * 1e3,
    )
    return replace(request, cluster=Cluster(name="c", nodes=nodes, links=(link,)))


@pytest.mark.parametrize(
    ("fast", "slow", "there_bytes", "back_bytes"),
    [
        ("bfloat16", "float16", 2, 2),
        ("bfloat16", "float32", 2, 4),
        ("float32", "float16", 4, 2),
        ("float32", "float32", 4, 4),
    ],
)
def test_a_hop_has_the_bytes_of_its_sender_each_way(
    fast: Precision, slow: Precision, there_bytes: int, back_bytes: int
):
    request = request_of(fast, slow)
    options = options_of(request, (1,))
    a, b = (
        next(n for n, option in enumerate(options) if option.device_class == c)
        for c in (0, 1)
    )
    hop_s_BKOO, link_s_BKOO = hop_tables(request, options, num_kinds=1)
    elements = np.array([1, 2]) * request.seq_len * hidden_size(request.model)
    # the mean of the activation's way and the gradient's way back
    mean_s = elements * (there_bytes + back_bytes) / 2 * LINK_S_PER_BYTE
    least_s = elements * min(there_bytes, back_bytes) * LINK_S_PER_BYTE
    np.testing.assert_allclose(hop_s_BKOO[:, 0, a, b], LATENCY_S + mean_s)
    np.testing.assert_allclose(link_s_BKOO[:, 0, a, b], least_s)
