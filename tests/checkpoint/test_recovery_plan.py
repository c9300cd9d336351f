# SPDX-License-Identifier: Apache-2.0
"""What can be restored from surviving parts, against a plain search of all places."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.checkpoint.recovery_plan import (
    CLOUD,
    LeafSource,
    PartialSnapshot,
    assign,
    newest,
    unasked,
)

LEAVES = tuple(f"leaf{n}" for n in range(5))
WORKERS = ("a", "b", "c")
SIZES = {leaf: 10 + n for n, leaf in enumerate(LEAVES)}


saves = st.tuples(st.integers(0, 2), st.sampled_from(("", "first", "second")))


@st.composite
def places(draw: st.DrawFn) -> list[PartialSnapshot]:
    found = []
    for worker in (*WORKERS, CLOUD):
        tiers = ("cloud",) if worker == CLOUD else ("memory", "disk")
        for tier in tiers:
            for save in draw(st.sets(saves)):
                leaves = frozenset(draw(st.sets(st.sampled_from(LEAVES))))
                found.append(
                    PartialSnapshot(worker=worker, tier=tier, save=save, leaves=leaves)
                )
    return found


needs = st.dictionaries(st.sampled_from(WORKERS), st.sets(st.sampled_from(LEAVES)))


@given(places(), needs)
def test_the_newest_is_the_last_that_lacks_nothing(
    snapshots: list[PartialSnapshot], wanted: dict[str, set[str]]
):
    needed = set().union(*wanted.values())
    there = {
        save: {leaf for h in snapshots if h.save == save for leaf in h.leaves}
        for save in {h.save for h in snapshots}
    }
    expected = None
    for save in sorted(there):
        if not needed - there[save]:
            expected = save
    assert newest(snapshots, needed) == expected
    if expected is not None:
        older = newest(snapshots, needed, limit=expected)
        assert older is None or older < expected


@given(places(), needs)
def test_every_leaf_comes_from_the_nearest_place_that_holds_it(
    snapshots: list[PartialSnapshot], wanted: dict[str, set[str]]
):
    save = newest(snapshots, set().union(*wanted.values()))
    if save is None:
        return
    found = assign(snapshots, save, wanted, SIZES)
    assert {w: set(leaves) for w, leaves in found.items()} == wanted
    for worker, leaves in found.items():
        for leaf, source in leaves.items():
            there = {
                (h.worker, h.tier)
                for h in snapshots
                if h.save == save and leaf in h.leaves
            }
            assert (source.worker, source.tier) in there
            own = {tier for holder, tier in there if holder == worker}
            if own:
                nearest = "memory" if "memory" in own else "disk"
                assert source == LeafSource(worker=worker, tier=nearest)
            elif source.tier == "cloud":
                assert there == {(CLOUD, "cloud")}


def test_what_failed_once_is_fetched_from_elsewhere_until_nothing_is_left():
    snapshots = [
        PartialSnapshot(
            worker="a", tier="disk", save=(1, ""), leaves=frozenset(LEAVES)
        ),
        PartialSnapshot(
            worker="b", tier="disk", save=(1, ""), leaves=frozenset(LEAVES)
        ),
        PartialSnapshot(
            worker=CLOUD, tier="cloud", save=(1, ""), leaves=frozenset(LEAVES)
        ),
    ]
    excluded: set[tuple[str, LeafSource]] = set()
    tried = []
    for _ in range(3):
        found = assign(snapshots, (1, ""), {"a": {"leaf0"}}, SIZES, excluded)
        tried.append(found["a"]["leaf0"].worker)
        excluded.add(("leaf0", found["a"]["leaf0"]))
    assert tried == ["a", "b", CLOUD]
    with pytest.raises(KeyError, match="leaf0"):
        assign(snapshots, (1, ""), {"a": {"leaf0"}}, SIZES, excluded)


def test_peers_share_what_is_to_be_sent():
    snapshots = [
        PartialSnapshot(
            worker=worker, tier="memory", save=(4, ""), leaves=frozenset(LEAVES)
        )
        for worker in ("a", "b")
    ]
    found = assign(snapshots, (4, ""), {"c": set(LEAVES)}, SIZES)["c"]
    sent = {
        worker: sum(SIZES[leaf] for leaf, s in found.items() if s.worker == worker)
        for worker in ("a", "b")
    }
    assert abs(sent["a"] - sent["b"]) <= max(SIZES.values())


def part(worker: str, step: int, *absent: str) -> PartialSnapshot:
    return PartialSnapshot(
        worker=worker,
        tier="disk",
        save=(step, "first"),
        leaves=frozenset(),
        absent=frozenset(absent),
    )


def test_whose_part_is_on_no_disk_that_was_asked_may_have_it():
    parts = [part("a", 5, "b", "c"), part("b", 5, "a", "c"), part("a", 3, "b")]
    assert unasked(parts, {"a", "b"}) == {5: {"c"}}
    assert unasked(parts, {"a", "b", "c"}) == {}  # c was asked, and has none
    shared = [part("a", 5, "c"), part("b", 5)]  # whole on the disk of b
    assert unasked(shared, {"a", "b"}) == {}
