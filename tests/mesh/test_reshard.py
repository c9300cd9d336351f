# SPDX-License-Identifier: Apache-2.0
"""Moves between unlike meshes give what `jax.device_put` gives."""

from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from hetjax.comm.transport import InProcess, Tag
from hetjax.mesh.axes import stage_mesh
from hetjax.mesh.reshard import parcel, pieces, reshard, shard_boxes

SPECS = [
    PartitionSpec(),
    PartitionSpec("data"),
    PartitionSpec("tensor"),
    PartitionSpec(None, "tensor"),
    PartitionSpec("data", "tensor"),
    PartitionSpec("tensor", "data"),
    PartitionSpec(("tensor", "data")),
]


@st.composite
def layouts(draw: st.DrawFn) -> NamedSharding:
    data, tensor = draw(
        st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 2)])
    )
    first = draw(st.integers(0, 16 - data * tensor))
    devices = jax.devices()[first : first + data * tensor]
    mesh = stage_mesh(devices, data=data, tensor=tensor)
    return NamedSharding(mesh, draw(st.sampled_from(SPECS)))


@settings(max_examples=40)
@given(layouts(), layouts())
def test_a_resharded_array_is_what_device_put_gives(
    source: NamedSharding, target: NamedSharding
):
    x_host = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
    moved = reshard(jax.device_put(x_host, source), target)
    expected = jax.device_put(x_host, target)
    assert moved.sharding == target
    for found, wanted in zip(
        moved.addressable_shards, expected.addressable_shards, strict=True
    ):
        assert found.device == wanted.device
        np.testing.assert_array_equal(found.data, wanted.data)


@settings(max_examples=100)
@given(layouts(), layouts())
def test_pieces_cover_every_target_element_once_from_a_device_that_holds_it(
    source: NamedSharding, target: NamedSharding
):
    shape = (8, 16)
    held, wanted = shard_boxes(source, shape), shard_boxes(target, shape)
    for device, parts in pieces(shape, source, target).items():
        cover = np.zeros(shape, int)
        for piece in parts:
            assert piece.target == device
            inside = zip(held[piece.source], piece.box, strict=True)
            assert all(a <= lo and hi <= b for (a, b), (lo, hi) in inside)
            cover[tuple(slice(lo, hi) for lo, hi in piece.box)] += 1
        box = np.zeros(shape, int)
        box[tuple(slice(lo, hi) for lo, hi in wanted[device])] = 1
        np.testing.assert_array_equal(cover, box)


def test_a_replicated_source_shares_the_sending():
    devices = jax.devices()
    source = NamedSharding(stage_mesh(devices[:4], data=1, tensor=4), PartitionSpec())
    target = NamedSharding(stage_mesh(devices[4:8], data=4, tensor=1), PartitionSpec())
    senders = [parts[0].source for parts in pieces((8,), source, target).values()]
    assert sorted(d.id for d in senders) == [d.id for d in devices[:4]]


@settings(max_examples=40)
@given(layouts(), layouts())
def test_what_waits_at_the_sender_is_no_more_than_its_array(
    source: NamedSharding, target: NamedSharding
):
    x = jax.device_put(np.zeros((8, 16), np.float32), source)
    cuts = {id(cut): cut for ps in parcel(x, target).parts.values() for cut, _ in ps}
    held: Counter[jax.Device] = Counter()
    for cut in cuts.values():
        (device,) = cut.devices()
        held[device] += cut.nbytes
    shard_bytes = x.addressable_shards[0].data.nbytes
    assert all(device in source.device_set for device in held)
    assert all(size <= shard_bytes for size in held.values())


@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 1), (2, 2)])
def test_a_message_takes_memory_at_its_receiver_from_receiving_on(
    data: int, tensor: int
):
    devices = jax.devices()
    source = NamedSharding(
        stage_mesh(devices[:2], data=1, tensor=2), PartitionSpec("data")
    )
    mesh = stage_mesh(devices[8 : 8 + data * tensor], data=data, tensor=tensor)
    target = NamedSharding(mesh, PartitionSpec("data"))

    def arrays_there() -> int:
        return sum(not a.devices().isdisjoint(devices[8:12]) for a in jax.live_arrays())

    transport, before = InProcess({(0, 1): target}), arrays_there()
    tag = Tag(generation=0, step=1, kind="F", replica=0, stage=1, microbatch=2)
    transport.send(tag, jax.device_put(np.zeros((8, 16), np.float32), source))
    assert transport.arrived(tag) and arrays_there() == before
    x = transport.receive(tag, jax.ShapeDtypeStruct((8, 16), np.float32))
    assert x.sharding == target and arrays_there() > before


def test_a_transfer_is_delivered_once_and_to_its_tag_alone():
    sharding = NamedSharding(
        stage_mesh(jax.devices()[:1], data=1, tensor=1), PartitionSpec()
    )
    transport = InProcess({(0, 1): sharding})
    tag = Tag(generation=0, step=1, kind="F", replica=0, stage=1, microbatch=2)
    other = Tag(generation=0, step=1, kind="B", replica=0, stage=1, microbatch=2)
    transport.send(tag, jax.numpy.ones((2, 3)))
    assert transport.arrived(tag) and not transport.arrived(other)
    expected = jax.ShapeDtypeStruct((2, 3), np.float32)
    assert transport.receive(tag, expected).sum() == 6
    assert not transport.arrived(tag)


def test_a_transfer_of_another_shape_is_refused():
    sharding = NamedSharding(
        stage_mesh(jax.devices()[:1], data=1, tensor=1), PartitionSpec()
    )
    transport = InProcess({(0, 1): sharding})
    tag = Tag(generation=0, step=1, kind="F", replica=0, stage=1, microbatch=2)
    transport.send(tag, jax.numpy.ones((2, 3)))
    with pytest.raises(AssertionError, match=r"carried .*expected"):
        transport.receive(tag, jax.ShapeDtypeStruct((3, 2), np.float32))
