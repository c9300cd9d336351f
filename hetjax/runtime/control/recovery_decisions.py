# SPDX-License-Identifier: Apache-2.0
"""What follows from what workers tell after a loss: functions without I/O.

Owns which step is committed and who lacks it, which save to go back to and when to ask
the store, and what a round of a recovery has moved. Does not own asking and doing
(`recovery.py`), nor who gives which slice to whom (`checkpoint/recovery_plan.py`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hetjax.checkpoint.recovery_plan import PartialSnapshot, Save, newest
from hetjax.runtime.execution.commit import StepCommit
from hetjax.runtime.rpc.schema import Collected, Reached

ASK_STORE: Literal["ask the store"] = "ask the store"


def committed_step(
    reached: Mapping[str, Reached],
) -> tuple[StepCommit | None, list[str]]:
    """The commit of the newest step that a survivor has, and who has to finish it.

    These have done their part of it, or that one would not know it; who was given an
    older state since has none. None and nobody if nobody knows any.
    """
    newest_at = max((r.at for r in reached.values() if r.at is not None), default=None)
    known = [r.commit for r in reached.values() if r.at == newest_at and r.commit]
    if newest_at is None or not known:
        return None, []
    behind = {w: r for w, r in reached.items() if r.at == newest_at - 1}
    return known[0], [w for w, r in behind.items() if r.is_broken_off]


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftovers:
    """What is left of a run's saves, and what has been tried to restore one.

    `needed` are the leaves of a whole state. `saved` is the newest step that all
    workers are known to have saved, `failed` the save that was tried last.
    """

    held: Sequence[PartialSnapshot]
    needed: frozenset[str]
    saved: int
    has_asked_store: bool = False
    failed: Save | None = None

    def with_store(self, found: Iterable[PartialSnapshot]) -> "Leftovers":
        """What was tried without the store is tried again: it may have what lacked."""
        held = [*self.held, *found]
        return replace(self, held=held, has_asked_store=True, failed=None)


def next_save(left: Leftovers) -> Save | Literal["ask the store"] | None:
    """The newest whole save that has not failed; None if there is no other.

    The store is asked first where it may have a newer one than the workers have
    together, or what is damaged there.
    """
    save = newest(left.held, left.needed, left.failed)
    if left.has_asked_store:
        return save
    if save is None or _is_behind(save, left):
        return ASK_STORE
    return save


def kept_save(left: Leftovers) -> Save | None:
    """The newest save that disks, or the store, have all leaves of."""
    lasting = [snapshot for snapshot in left.held if snapshot.tier != "memory"]
    return newest(lasting, left.needed)


def _is_behind(save: Save, left: Leftovers) -> bool:
    """Whether there has been a newer save, of which the workers lack something."""
    return save[0] < left.saved or save < max(holding.save for holding in left.held)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """All workers have the state after `step`; what moved, and until when, by tier.

    `host` is what its checkpoint says besides; empty if it was in memory alone. `kept`
    is the newest save that is whole without anybody's memory, as far as was seen.
    """

    step: int
    kept: Save | None = None
    host: Mapping[str, Any] = field(default_factory=dict)
    num_bytes: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


def still_saved(saved: int, restored: Restored, has_store: bool) -> int | None:
    """The newest checkpoint that is left: disks may be gone with their machines."""
    saved = min(saved, restored.step)
    if has_store:
        return saved  # it may have more than was looked for
    return None if restored.kept is None else min(saved, restored.kept[0])


def is_kept(saved: int | None, restored: Restored) -> bool:
    """Whether that checkpoint was seen: else the store may have it, or nobody."""
    return saved is None or (restored.kept is not None and saved <= restored.kept[0])


def safe_save(
    before: Save | None, saved: int | None, restored: Restored
) -> Save | None:
    """What no save may remove before it is whole itself: what the run would go back to.

    If that is not what was `before`, it is an older one that was found whole.
    """
    is_found = restored.kept is not None and restored.kept[0] == saved
    return restored.kept if is_found else before


def after_round(before: Restored, answers: Collection[Collected]) -> Restored:
    """Add a round: its bytes of all workers, and the time of the slowest."""
    num_bytes, seconds = dict(before.num_bytes), dict(before.seconds)
    for tier in sorted({tier for collected in answers for tier in collected.num_bytes}):
        some = [collected for collected in answers if tier in collected.num_bytes]
        num_bytes[tier] = num_bytes.get(tier, 0) + sum(c.num_bytes[tier] for c in some)
        took_s = max(collected.seconds[tier] for collected in some)
        seconds[tier] = seconds.get(tier, 0.0) + took_s
    return replace(before, num_bytes=num_bytes, seconds=seconds)
