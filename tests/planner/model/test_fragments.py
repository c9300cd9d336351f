# SPDX-License-Identifier: Apache-2.0
"""Limits on stages inside nodes, against every way to fill the nodes."""

from collections.abc import Sequence
from itertools import accumulate, product
from operator import mul

from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.planner.model.meshes import fragment_limits

Counts = tuple[int, ...]  # stages of each size


def counts_within(sizes: Sequence[int], num_devices: int) -> set[Counts]:
    """Return every number of stages of each size that takes at most these devices."""
    return {
        counts
        for counts in product(*(range(num_devices // size + 1) for size in sizes))
        if sum(map(mul, counts, sizes)) <= num_devices
    }


def counts_in_nodes(
    sizes: Sequence[int], num_devices: int, devices_per_node: int
) -> set[Counts]:
    """Return the stage counts of each size that nodes can hold, the last the rest."""
    found = {(0,) * len(sizes)}
    while num_devices > 0:
        in_node = counts_within(sizes, min(devices_per_node, num_devices))
        found = {
            tuple(a + b for a, b in zip(counts, more, strict=True))
            for counts in found
            for more in in_node
        }
        num_devices -= devices_per_node
    return found


def devices_of(counts: Counts, sizes: Sequence[int], least: int) -> int:
    """Return the number of devices of stages of at least this size."""
    taken = zip(counts, sizes, strict=True)
    return sum(count * size for count, size in taken if size >= least)


def counts_allowed(
    sizes: Sequence[int], num_devices: int, devices_per_node: int
) -> set[Counts]:
    limits = list(fragment_limits(num_devices, devices_per_node, sizes))
    return {
        counts
        for counts in counts_within(sizes, num_devices)
        if all(devices_of(counts, sizes, size) <= room for size, room in limits)
    }


@st.composite
def sizes_that_divide_each_other(draw: st.DrawFn) -> list[int]:
    factors = draw(st.lists(st.sampled_from((1, 2, 3)), min_size=1, max_size=4))
    return [size for size in dict.fromkeys(accumulate(factors, mul)) if size <= 8]


NUM_DEVICES = st.integers(1, 16)
DEVICES_PER_NODE = st.integers(1, 9)


@settings(max_examples=80)
@given(sizes_that_divide_each_other(), NUM_DEVICES, DEVICES_PER_NODE)
def test_stages_that_divide_each_other_fit_exactly_if_the_limits_say_so(
    sizes: list[int], num_devices: int, devices_per_node: int
) -> None:
    allowed = counts_allowed(sizes, num_devices, devices_per_node)
    assert allowed == counts_in_nodes(sizes, num_devices, devices_per_node)


@settings(max_examples=80)
@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=4, unique=True),
    NUM_DEVICES,
    DEVICES_PER_NODE,
)
def test_no_limit_forbids_what_nodes_hold_and_each_is_met_by_some_stages(
    sizes: list[int], num_devices: int, devices_per_node: int
) -> None:
    held = counts_in_nodes(sizes, num_devices, devices_per_node)
    assert held <= counts_allowed(sizes, num_devices, devices_per_node)
    limits = dict(fragment_limits(num_devices, devices_per_node, sizes))
    for size in sizes:
        most = max(devices_of(counts, sizes, size) for counts in held)
        assert limits.get(size, num_devices) == most


def test_stages_that_lie_anywhere_have_no_limits() -> None:
    assert not list(fragment_limits(7, 0, (1, 2, 4)))


def test_the_last_node_may_be_a_smaller_one() -> None:
    # of 4 + 4 + 3 devices, stages of 4 can use 8; those of 2 and above, 4 + 4 + 2
    assert dict(fragment_limits(11, 4, (1, 2, 4))) == {2: 10, 4: 8}
