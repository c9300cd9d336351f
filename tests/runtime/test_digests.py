# SPDX-License-Identifier: Apache-2.0
"""Digests differ for unlike bits and do not depend on the sharding."""

import struct
from collections import Counter
from functools import cache
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetjax.optimizers.optimizer import NonElementwise, optimizer
from hetjax.plans.plan import Group, Stage, StageKey, StageMesh
from hetjax.runtime.execution.checking.checks import disagreements
from hetjax.runtime.execution.checking.digests import digests, is_finite, whole
from hetjax.runtime.execution.shares import HostShare, packed_shares, unpacked_shares
from hetjax.runtime.execution.updates.groups import CPU, rounds_alike
from hetjax.training.settings.config import OptimizerConfig

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
LAYOUTS = [
    PartitionSpec(),
    PartitionSpec(None, "data", "tensor"),
    PartitionSpec(None, ("tensor", "data")),
    PartitionSpec(None, None, "tensor"),
]
SHAPE = (3, 4, 2)


def placed(values: np.ndarray, layout: PartitionSpec) -> jax.Array:
    return jax.device_put(values, NamedSharding(MESH, layout))


@cache
def programs(sharding: NamedSharding) -> tuple[Any, Any]:
    """Return the programs (digest, whether all are finite) for this sharding."""
    return (
        jax.jit(lambda array: digests([[array]], [[sharding]])),
        jax.jit(lambda array: is_finite([array], [sharding])),
    )


def digest(array: jax.Array) -> int:
    (found,) = whole(np.asarray(programs(array.sharding)[0](array)))
    return found


def finite(array: jax.Array) -> bool:
    return bool(programs(array.sharding)[1](array))


def by_hand(values: np.ndarray) -> int:
    """Apply the published mixers of MurmurHash3 and lowbias32, number by number."""

    def mixed(x: int, first: int, by: int, second: int) -> int:
        x ^= 0x9E3779B9
        x = (x ^ (x >> 16)) * first % 2**32
        x = (x ^ (x >> by)) * second % 2**32
        return x ^ (x >> 16)

    bits = [struct.unpack("<I", struct.pack("<f", x))[0] for x in values.flat]
    low = sum(mixed(x, 0x85EBCA6B, 13, 0xC2B2AE35) for x in bits) % 2**32
    high = sum(mixed(x, 0x7FEB352D, 15, 0x846CA68B) for x in bits) % 2**32
    return low | high << 32


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_digest_is_the_same_for_every_layout(layout: PartitionSpec):
    values = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    assert digest(placed(values, layout)) == by_hand(values)
    shuffled = np.random.default_rng(1).permutation(values.reshape(-1)).reshape(SHAPE)
    assert digest(placed(shuffled, layout)) == by_hand(values)


@given(st.integers(0, 23), st.integers(0, 31), st.integers(0, 23), st.integers(0, 31))
def test_one_bit_or_two_change_a_digest(at: int, bit: int, other: int, other_bit: int):
    values = np.zeros(SHAPE, np.float32)
    flipped = values.copy()
    flipped.reshape(-1).view(np.uint32)[at] ^= np.uint32(1 << bit)
    assert digest(placed(flipped, LAYOUTS[0])) != digest(placed(values, LAYOUTS[0]))
    twice = flipped.copy()
    twice.reshape(-1).view(np.uint32)[other] ^= np.uint32(1 << other_bit)
    is_same = digest(placed(twice, LAYOUTS[0])) == digest(placed(values, LAYOUTS[0]))
    assert is_same == ((at, bit) == (other, other_bit))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_found_wherever_it_lies(
    layout: PartitionSpec, bad: float
):
    values = np.full(SHAPE, np.finfo(np.float32).max, np.float32)
    assert finite(placed(values, layout))
    for at in range(values.size):
        values.reshape(-1)[at] = bad
        assert not finite(placed(values, layout))
        values.reshape(-1)[at] = 0.0


def test_nothing_of_a_digest_is_lost_when_it_is_read():
    pairs = np.asarray(jnp.array([[1, 2], [2**32 - 1, 2**32 - 1]], jnp.uint32))
    assert whole(pairs) == [1 + 2 * 2**32, 2**64 - 1]


TOLD = st.dictionaries(
    st.tuples(st.integers(0, 4), st.integers(0, 2)),
    st.dictionaries(st.sampled_from([(0, 2), (2, 3), "tied"]), st.integers(0, 2)),
    max_size=8,
)


@given(TOLD)
def test_who_differs_from_more_than_half_is_named_and_else_nobody(
    told: dict[StageKey, dict[Group, int]],
):
    found = {d.group: d for d in disagreements(told)}
    for group in [(0, 2), (2, 3), "tied"]:
        own = {stage: of[group] for stage, of in told.items() if group in of}
        if len(set(own.values())) <= 1:
            assert group not in found
            continue
        assert set(found[group].holders) == own.keys()
        counts = Counter(own.values())
        usual = [digest for digest, n in counts.items() if n > len(own) / 2]
        odd = {s for s, digest in own.items() if usual and digest != usual[0]}
        assert set(found[group].odd) == odd


@given(TOLD, st.data())
def test_shares_arrive_as_they_were_told(
    told: dict[StageKey, dict[Group, int]], data: st.DataObject
):
    groups: list[Group] = [(0, 2), (2, 3), "tied"]
    large = st.integers(0, 2**64 - 1)
    shares = {
        stage: HostShare(
            squares=data.draw(st.floats(allow_nan=False)),
            is_finite=data.draw(st.booleans()),
            digests={group: data.draw(large) for group in of},
        )
        for stage, of in told.items()
    }
    losses = {stage: float(n) for n, stage in zip(count(), told, strict=False) if n % 2}
    numbers = {group: n for n, group in enumerate(groups)}
    sent = [packed_shares({s: x}, losses, numbers) for s, x in shares.items()]
    assert unpacked_shares(sent, groups) == (shares, losses)


def stage(node: str, data: int = 1) -> Stage:
    return Stage(
        node=node,
        devices=tuple(range(data)),
        mesh=StageMesh(data=data),
        layers=(0, 2),
        launch_ahead=1,
    )


ADAMW, MUON = (optimizer(OptimizerConfig(name=name), 9) for name in ("adamw", "muon"))
GPUS = {"a": "H20", "b": "H20", "c": "A100-SXM4-80GB", "d": CPU}


@pytest.mark.parametrize(
    ("kinds", "group", "holders", "expected"),
    [
        ({}, (0, 2), [stage("a"), stage("b", 2)], True),
        (GPUS, (0, 2), [stage("a"), stage("b")], True),
        (GPUS, (0, 2), [stage("a"), stage("b", 2)], False),
        (GPUS, (0, 2), [stage("a"), stage("c")], False),
        (GPUS, (0, 2), [stage("a"), stage("d")], False),
        (GPUS, "embed.table", [stage("a"), stage("b")], False),
        ({}, "embed.table", [stage("a"), stage("b")], True),
    ],
)
def test_weights_are_compared_where_an_update_rounds_alike(
    kinds: dict[str, str], group: Group, holders: list[Stage], expected: bool
):
    assert rounds_alike(ADAMW, kinds, group, holders) == expected
    assert isinstance(MUON, NonElementwise)
    assert not rounds_alike(MUON, kinds, group, holders)
