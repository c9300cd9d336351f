# SPDX-License-Identifier: Apache-2.0
"""Decides what follows from the workers' answers after a loss: functions without I/O.

Owns which step is committed and who lacks it, which save to restore and when to search
the store, and what a round of a recovery has moved. Does not own requests and their
effects (`recovery.py`), nor the sender of each slice
(`checkpoint/recovery_plan.py`).
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
    """Return the commit of the newest step that a survivor has, and who must finish it.

    Those workers have done their part of the step, or no survivor would have its
    commit. A worker that has since received an older state has no commit. (None, []) if
    no survivor has one.
    """
    newest_at = max((r.at for r in reached.values() if r.at is not None), default=None)
    known = [r.commit for r in reached.values() if r.at == newest_at and r.commit]
    if newest_at is None or not known:
        return None, []
    behind = {w: r for w, r in reached.items() if r.at == newest_at - 1}
    return known[0], [w for w, r in behind.items() if r.is_aborted]


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftovers:
    """What is left of a run's saves, and the attempts to restore one.

    `needed` are the leaves of a whole state. `saved` is the newest step that all
    workers are known to have saved, `failed` the save that was tried last.
    """

    held: Sequence[PartialSnapshot]
    needed: frozenset[str]
    saved: int
    has_asked_store: bool = False
    failed: Save | None = None

    def with_store(self, found: Iterable[PartialSnapshot]) -> "Leftovers":
        """Add what the store has, and retry failed saves: it may fill their gaps."""
        held = [*self.held, *found]
        return replace(self, held=held, has_asked_store=True, failed=None)


def next_save(left: Leftovers) -> Save | Literal["ask the store"] | None:
    """Return the newest whole save that has not failed; None if there is no other.

    ASK_STORE comes first if the store may have a newer save than the workers have
    together, or intact copies of damaged parts.
    """
    save = newest(left.held, left.needed, left.failed)
    if left.has_asked_store:
        return save
    if save is None or _is_behind(save, left):
        return ASK_STORE
    return save


def kept_save(left: Leftovers) -> Save | None:
    """Return the newest save of which disks, or the store, have all leaves."""
    lasting = [snapshot for snapshot in left.held if snapshot.tier != "memory"]
    return newest(lasting, left.needed)


def _is_behind(save: Save, left: Leftovers) -> bool:
    """Return whether there was a newer save, of which the workers lack a part."""
    return save[0] < left.saved or save < max(holding.save for holding in left.held)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """All workers have the state after `step`; bytes moved and seconds taken, by tier.

    `host` is the other content of the checkpoint; empty if the state was only in
    memory. `kept` is the newest save seen that is whole without any worker's memory.
    """

    step: int
    kept: Save | None = None
    host: Mapping[str, Any] = field(default_factory=dict)
    num_bytes: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


def still_saved(saved: int, restored: Restored, has_store: bool) -> int | None:
    """Return the newest checkpoint left: disks may be gone with their machines."""
    saved = min(saved, restored.step)
    if has_store:
        return saved  # the store may have more than the recovery looked for
    return None if restored.kept is None else min(saved, restored.kept[0])


def is_kept(saved: int | None, restored: Restored) -> bool:
    """Return whether the recovery saw that checkpoint; else at most a store has it."""
    return saved is None or (restored.kept is not None and saved <= restored.kept[0])


def safe_save(
    before: Save | None, saved: int | None, restored: Restored
) -> Save | None:
    """Return the save that must stay until a newer one is whole, to fall back to.

    It is `before`, or an older one that the recovery found whole.
    """
    is_found = restored.kept is not None and restored.kept[0] == saved
    return restored.kept if is_found else before


def after_round(before: Restored, answers: Collection[Collected]) -> Restored:
    """Add a round: the bytes of all workers, and the time of the slowest."""
    num_bytes, seconds = dict(before.num_bytes), dict(before.seconds)
    for tier in sorted({tier for collected in answers for tier in collected.num_bytes}):
        some = [collected for collected in answers if tier in collected.num_bytes]
        num_bytes[tier] = num_bytes.get(tier, 0) + sum(c.num_bytes[tier] for c in some)
        took_s = max(collected.seconds[tier] for collected in some)
        seconds[tier] = seconds.get(tier, 0.0) + took_s
    return replace(before, num_bytes=num_bytes, seconds=seconds)
