# SPDX-License-Identifier: Apache-2.0
"""Finds the checkpoint of a run with the lowest validation loss.

Owns the rule: among steps that were evaluated and saved, and whose checkpoint still
exists, the lowest loss is best, and among equal losses the first. Steps that the run
has rolled back do not count. Does not own keeping it (`checkpoint/disk.py`).
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Self

VAL_LOSS, BEST = "val_loss", "best"


def losses_of(metrics: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Return validation losses by step from the lines of metrics.jsonl."""
    return {line["step"]: line[VAL_LOSS] for line in metrics if VAL_LOSS in line}


def best_of(losses: Mapping[int, float], saved: Collection[int]) -> int | None:
    """Return the step of the best checkpoint; None if none was evaluated.

    >>> best_of({0: 1.0, 10: 5.0, 20: 4.0, 30: 4.0}, saved=[10, 20, 30])
    20
    """
    both = (step for step in saved if step in losses)
    return min(both, key=lambda step: (losses[step], step), default=None)


class BestCheckpoint:
    """The best checkpoint so far of a run that keeps its newest `keep`."""

    def __init__(self, losses: Mapping[int, float], keep: int) -> None:
        self._losses, self._keep = dict(losses), keep
        self._saved: set[int] = set()

    @classmethod
    def before(
        cls,
        metrics: Iterable[Mapping[str, Any]],
        events: Iterable[Mapping[str, Any]],
        keep: int,
    ) -> Self:
        """Return the best checkpoint according to the run's journals."""
        found = cls(losses_of(metrics), keep)
        for line in events:
            if line["event"] in ("restored", "recovered"):
                found._saved = {s for s in found._saved if s <= line["step"]}
            if line["event"] in ("restored", "saved"):
                found.on_saved(line["step"])
        return found

    @property
    def step(self) -> int | None:
        return best_of(self._losses, self._saved)

    @property
    def loss(self) -> float | None:
        return None if self.step is None else self._losses[self.step]

    def on_saved(self, step: int) -> None:
        """Add a step that is complete on the disks; older steps may be gone now."""
        newest = sorted({*self._saved, step})[-self._keep :]
        kept = () if self.step is None else (self.step,)
        self._saved = {*newest, *kept}

    def on_evaluated(self, step: int, loss: float) -> None:
        self._losses[step] = loss

    def forget_after(self, step: int) -> None:
        """Forget the steps after this one, which were rolled back."""
        self._losses = {s: x for s, x in self._losses.items() if s <= step}
        self._saved = {s for s in self._saved if s <= step}
