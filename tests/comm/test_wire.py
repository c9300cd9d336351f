# SPDX-License-Identifier: Apache-2.0
"""Senders and receivers of rows, for transfers between stages that span workers."""

from hypothesis import given
from hypothesis import strategies as st

from hetjax.comm.wire import Ranks, unit_rows, who_sends

NAMES = ["a", "b", "c", "d"]
RANKS = st.lists(
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True).map(tuple),
    min_size=1,
    max_size=4,
).map(tuple)


@given(RANKS, RANKS, st.integers(1, 3))
def test_who_needs_rows_gets_each_once_from_one_that_has_them(
    senders: Ranks, receivers: Ranks, times: int
):
    num_rows = len(senders) * len(receivers) * times
    unit = unit_rows(num_rows, senders, receivers)
    got: dict[tuple[str, int], list[str]] = {}
    for (giving, needing), units in who_sends(senders, receivers).items():
        assert units == sorted(units)
        for start, stop in units:
            for row in range(start * unit, stop * unit):
                got.setdefault((needing, row), []).append(giving)
    for worker in NAMES:
        for row in range(num_rows):
            has = worker in senders[row * len(senders) // num_rows]
            needs = worker in receivers[row * len(receivers) // num_rows]
            found = got.get((worker, row), [])
            assert len(found) == needs
            for giving in found:
                assert giving in senders[row * len(senders) // num_rows]
                assert giving == worker or not has


def test_workers_with_whole_stages_send_everything_in_one_range():
    one_rank, three_ranks = (("a",),), (("b",),) * 3
    assert who_sends(one_rank, three_ranks) == {("a", "b"): [(0, 3)]}


def test_receivers_of_the_same_rows_take_turns_among_those_who_have_them():
    found = who_sends((("a", "b"),), (("c", "d"),))
    assert found == {("a", "c"): [(0, 1)], ("b", "d"): [(0, 1)]}
