# SPDX-License-Identifier: Apache-2.0
"""The two forms of the prefix bound against its recurrence and each other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.schedule.bound import prefix_behind_s, prefix_pieces

seconds = st.floats(0, 10, allow_subnormal=False)
hops = st.tuples(seconds, st.just(0.0) | seconds)  # one way, and time on the link


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[float], list[tuple[float, float]]]:
    num_stages = draw(st.integers(1, 6))
    return (
        draw(st.lists(seconds, min_size=num_stages, max_size=num_stages)),
        draw(st.lists(hops, min_size=num_stages - 1, max_size=num_stages - 1)),
    )


def by_recurrence(m: int, stage_s: list[float], hops: list[tuple[float, float]]):
    """Return R_s of the first stage, by the recurrence in the docstring."""
    if not hops:
        return max(m * stage_s[0], stage_s[0])
    (hop_s, link_s), rest_s = hops[0], by_recurrence(m, stage_s[1:], hops[1:])
    behind_s = max(2 * hop_s + rest_s, (m + 1) * link_s if link_s else 0.0)
    return max(m * stage_s[0], stage_s[0] + behind_s)


@given(pipelines(), st.integers(1, 100))
def test_both_forms_of_the_bound_are_its_recurrence(pipeline, m: int) -> None:
    stage_s, hops = pipeline
    expected_s = by_recurrence(m, stage_s, hops)
    round_trip_s, link_s = [2 * hop for hop, _ in hops], [link for _, link in hops]
    pieces = prefix_pieces(stage_s, round_trip_s, link_s)
    assert max(o + m * slope for o, slope in pieces) == pytest.approx(expected_s)
    before_s, before_hops = np.zeros(1), [(0.0, 0.0), *hops]
    for own_s, (hop_s, held_s) in zip(stage_s[::-1], before_hops[::-1], strict=True):
        before_s = prefix_behind_s(
            np.array([m]),
            np.array([own_s]),
            own_s + before_s,
            np.array([hop_s]),
            np.array([held_s]),
        )
    assert before_s[0] == pytest.approx(expected_s)
