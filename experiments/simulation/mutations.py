# SPDX-License-Identifier: Apache-2.0
"""Finds the random run that notices a broken rule.

Owns the search over seeds. Does not own the rules (`broken_messages.py`,
`broken_recovery.py`, `broken_store.py`), nor runs (`run.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from experiments.simulation.breaking import Mutation
from experiments.simulation.broken_messages import MESSAGES
from experiments.simulation.broken_recovery import RECOVERY
from experiments.simulation.broken_store import STORE
from experiments.simulation.run import simulate

MUTATIONS = (*MESSAGES, *RECOVERY, *STORE)


@dataclass(frozen=True, slots=True)
class Found:
    """The first seed at which the mutation causes a violation, and that violation."""

    seed: int
    violation: str


def simulated(mutation: Mutation, seed: int) -> str | None:
    """Return this run's violation while the rule is broken; None if there is none."""
    with mutation.broken():
        return simulate(seed).violation


def first_found(mutation: Mutation, seeds: Iterable[int]) -> Found | None:
    """Return the first seed that notices the mutation; None if no seed does.

    A seed that fails without the mutation does not count.
    """
    for seed in seeds:
        violation = simulated(mutation, seed)
        if violation is not None and simulate(seed).violation is None:
            return Found(seed, violation)
    return None


def table_row(mutation: Mutation, found: Found | None) -> str:
    told = "not found" if found is None else f"{found.seed + 1:5d} {found.violation}"
    return f"{mutation.rule:2d} | {mutation.what:64s} | {told[:66]}"
