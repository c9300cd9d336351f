# SPDX-License-Identifier: Apache-2.0
"""Defines short runs of preset `tiny`, as a user types them, on chosen devices.

Owns the words of the command and reading what a run leaves in its directory. Does not
own starting the command (`background.py`), nor how a part uses the results.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetjax.cluster.cluster import Cluster
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.rundir import METRICS

_TEXT = Path(__file__).parents[3] / "LICENSE"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSize:
    """The amount of work of a `tiny` run."""

    steps: int
    seq_len: int
    microbatches: int
    microbatch_size: int

    @property
    def global_batch(self) -> int:
        return self.microbatches * self.microbatch_size


def tiny_arguments(
    run_dir: Path, cluster: Cluster, size: RunSize, cache: Path, *more: str
) -> Sequence[str]:
    """Return what follows `python -m hetjax.train`. Writes the cluster's file and the
    text, which is the licence.

    The run generates no text and saves only at its end, unless `more` says otherwise.
    """
    file, text = run_dir.with_suffix(".toml"), cache.with_suffix(".txt")
    file.write_text(cluster_toml(cluster), encoding="utf-8")
    shutil.copyfile(_TEXT, text)
    return (
        *("tiny", "--no-simulate", "--run-dir", str(run_dir), "--cluster", str(file)),
        *("--steps", str(size.steps), "--seq-len", str(size.seq_len)),
        *("--global-batch", str(size.global_batch)),
        *("--data.path", str(text), "--data.cache-dir", str(cache)),
        *("--evaluation.sample-tokens", "0", "--evaluation.num-batches", "1"),
        *("--evaluation.every", "0", "--checkpoint.every", "0", *more),
    )


def losses(run_dir: Path) -> list[float]:
    """Return the loss of each committed step."""
    lines = read_journal(run_dir / METRICS)
    return [line["loss"] for line in lines if "loss" in line]


def furthest(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative distance of a step's loss; inf if steps are missing.

    >>> furthest([2.0, 1.1], [2.0, 1.0]), furthest([2.0], [2.0, 1.0])
    (0.10000000000000009, inf)
    """
    if len(found) != len(expected) or not expected:
        return float("inf")
    return max(
        abs(one - other) / abs(other)
        for one, other in zip(found, expected, strict=True)
    )
