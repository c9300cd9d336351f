# SPDX-License-Identifier: Apache-2.0
"""Decisions after a loss from the workers' reports, without any worker."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.checkpoint.recovery_plan import CLOUD, PartialSnapshot, Save
from hetjax.runtime.control import recovery_decisions
from hetjax.runtime.control.recovery_decisions import (
    ASK_STORE,
    Leftovers,
    Restored,
    after_round,
    committed_step,
    is_kept,
    next_save,
)
from hetjax.runtime.execution.commit import StepCommit
from hetjax.runtime.rpc.schema import Collected, Reached

NEEDED = frozenset("xy")


def commit(step: int) -> StepCommit:
    return StepCommit(squares=float(step), losses=(), num_tokens=1)


def at(step: int | None, knows: bool = True, is_aborted: bool = True) -> Reached:
    found = commit(step) if step and knows else None
    return Reached(at=step, commit=found, is_aborted=is_aborted)


@pytest.mark.parametrize(
    ("reached", "expected", "late"),
    [
        ({}, None, []),
        ({"a": at(None), "b": at(None)}, None, []),
        ({"a": at(3), "b": at(3)}, commit(3), []),
        ({"a": at(2), "b": at(3), "c": at(2)}, commit(3), ["a", "c"]),
        ({"a": at(None), "b": at(3), "c": at(2)}, commit(3), ["c"]),
        ({"a": at(1), "b": at(3), "c": at(2)}, commit(3), ["c"]),
        ({"a": at(3, knows=False), "b": at(2)}, None, []),
        ({"a": at(3, knows=False), "b": at(3), "c": at(2)}, commit(3), ["c"]),
        ({"a": at(0), "b": at(0)}, None, []),
        # since then, a was given the state of a checkpoint
        ({"a": at(2, is_aborted=False), "b": at(3)}, commit(3), []),
    ],
)
def test_a_step_that_one_has_committed_is_finished_by_who_lacks_it(
    reached: dict[str, Reached], expected: StepCommit | None, late: list[str]
):
    assert committed_step(reached) == (expected, late)


def held(save: Save, leaves: str = "xy", worker: str = "a") -> PartialSnapshot:
    return PartialSnapshot(
        worker=worker, tier="disk", save=save, leaves=frozenset(leaves)
    )


def left(*holdings: PartialSnapshot, saved: int = 0) -> Leftovers:
    return Leftovers(held=holdings, needed=NEEDED, saved=saved)


def test_the_newest_whole_save_is_taken_without_asking_the_store():
    assert next_save(left(held((2, "a")), held((4, "a")))) == (4, "a")
    assert next_save(left(held((4, "a"), "x"), held((4, "a"), "y", "b"))) == (4, "a")


def test_the_store_is_asked_where_it_may_have_what_the_workers_lack():
    for some in (
        left(),
        left(held((4, "a"), "x")),
        left(held((2, "a")), held((4, "a"), "x")),
        left(held((2, "a")), saved=4),
        replace(left(held((4, "a"))), failed=(4, "a")),
    ):
        assert next_save(some) == ASK_STORE


def test_with_the_store_what_has_failed_is_tried_once_more_and_then_an_older_one():
    found = left(held((2, "a")), held((4, "a")))
    tried: list[object] = []
    while (save := next_save(found)) is not None:
        tried.append(save)
        assert len(tried) < 9
        if save == ASK_STORE:
            found = found.with_store([held((4, "a"), "x", CLOUD)])
        else:
            found = replace(found, failed=save)
    assert tried == [(4, "a"), ASK_STORE, (4, "a"), (2, "a")]


SAVES = st.tuples(st.integers(0, 3), st.sampled_from("ab"))
HOLDINGS = st.lists(
    st.builds(held, SAVES, st.sampled_from(["x", "y", "xy"]), st.sampled_from("pq")),
    max_size=6,
)


@given(HOLDINGS, HOLDINGS, st.integers(0, 3))
def test_every_whole_save_is_tried_newest_first_and_the_store_is_asked_once(
    here: list[PartialSnapshot], stored: list[PartialSnapshot], saved: int
):
    found, tried, asked = left(*here, saved=saved), list[Save](), 0
    while (save := next_save(found)) is not None:
        if save == ASK_STORE:
            asked += 1
            tried.clear()
            found = found.with_store(stored)
        else:
            tried.append(save)
            assert len(tried) < 9
            found = replace(found, failed=save)
    every = {h.save for h in [*here, *stored]}
    whole = {
        save
        for save in every
        if NEEDED <= {x for h in [*here, *stored] if h.save == save for x in h.leaves}
    }
    assert tried == sorted(whole, reverse=True) and asked == 1


def test_a_round_counts_all_bytes_and_the_slowest_worker():
    told = [
        Collected(
            missing=(),
            num_bytes={"disk": 3, "peer": 1},
            seconds={"disk": 2.0, "peer": 1.0},
        ),
        Collected(missing=("x",), num_bytes={"disk": 4}, seconds={"disk": 5.0}),
    ]
    before = Restored(step=7, num_bytes={"disk": 1}, seconds={"disk": 0.5})
    assert after_round(before, told) == Restored(
        step=7, num_bytes={"disk": 8, "peer": 1}, seconds={"disk": 5.5, "peer": 1.0}
    )


@pytest.mark.parametrize(
    ("saved", "kept", "expected"),
    [(None, None, True), (4, None, False), (4, 2, False), (4, 4, True), (4, 6, True)],
)
def test_a_checkpoint_is_kept_where_all_of_it_was_seen_without_anybodys_memory(
    saved: int | None, kept: int | None, expected: bool
):
    seen = None if kept is None else (kept, "first")
    assert is_kept(saved, Restored(step=6, kept=seen)) is expected


def test_no_save_removes_what_the_run_would_go_back_to():
    older, before = (1, "first"), (3, "second")

    def safe(saved: int | None, kept: Save | None) -> Save | None:
        restored = Restored(step=6, kept=kept)
        return recovery_decisions.safe_save(before, saved, restored)

    assert safe(1, older) == older  # part of the newest save was lost with a disk
    assert safe(3, before) == before
    assert safe(3, (6, "third")) == before  # not all workers have reported it yet
    assert safe(3, older) == before  # the store has it
    assert safe(None, None) == before
