# SPDX-License-Identifier: Apache-2.0
"""Checks that every step that a store marks as complete can be restored from it.

Owns the decision which steps are complete, made from the objects alone, and the check
that the newest of them stays. Does not own the store (`object_store.py`), nor other
invariants (`invariants.py`).
"""

import json
from dataclasses import dataclass, field

from experiments.simulation.object_store import Bucket
from experiments.simulation.truth import Truth
from experiments.simulation.world import Violation
from hetjax.checkpoint.file_records import record_of_bytes


@dataclass
class Stored:
    """Complete steps of a bucket, each with its attempt, until an object `is_damaged`.

    `behind` is the newest complete step that the run has not gone back from.
    """

    bucket: Bucket
    truth: Truth
    layers: tuple[str, ...]
    is_damaged: bool = False
    whole: dict[int, str] = field(default_factory=dict)
    since_s: dict[int, float] = field(default_factory=dict)
    behind: int = -1

    def hear(self, name: str) -> None:
        """Check after an object came or went.

        A Violation is kept in `world.wrong`, because uploaders would swallow it.
        """
        try:
            self._check(name)
        except Violation as wrong:
            self.bucket.world.wrong = self.bucket.world.wrong or wrong

    def _check(self, name: str) -> None:
        step = name.split("/")[0]
        number = int(step.removeprefix("step_")) if step.startswith("step_") else None
        if number is None or self.is_damaged:
            return
        found = self._attempt(step, number)
        if found is not None:
            if self.whole.get(number) != found:
                self.since_s[number] = self.bucket.world.now_s
            self.whole[number] = found
            self.behind = max(self.behind, number)
        elif self.whole.pop(number, None) is not None:
            if max(self.whole, default=-1) < self.behind:
                raise Violation(f"{name}: the newest step in the store is gone")

    def go_back(self, step: int) -> None:
        """Allow saves of this step and later ones to be removed or replaced."""
        self.behind = max((at for at in self.whole if at < step), default=-1)

    def newest_at(self, then_s: float) -> int:
        """Return the newest step that has been complete since then; -1 if none."""
        known = [step for step in self.whole if self.since_s[step] <= then_s]
        return max(known, default=-1)

    def _attempt(self, step: str, number: int) -> str | None:
        """Return the attempt of a step that counts as complete; None if it does not.

        Raises Violation if a step counts as complete but is not.
        """
        objects = self.bucket.objects
        commit = objects.get(f"{step}/COMMIT")
        if not isinstance(commit, str):
            return None
        parts = []
        for worker, checksum in json.loads(commit)["manifests"].items():
            text = objects.get(f"{step}/{worker}/manifest.json")
            if not isinstance(text, str):
                return None
            if record_of_bytes(text.encode()).crc32c != checksum:
                return None
            parts.append((worker, json.loads(text)))
        values = {
            path.split("/")[1]: objects.get(f"{step}/{worker}/{path}")
            for worker, manifest in parts
            for path in manifest["files"]
        }
        if values != {layer: self.truth.state(number)[layer] for layer in self.layers}:
            raise Violation(f"{step} in the store counts as complete, and is not")
        return str(parts[0][1]["host"]["attempt"])
