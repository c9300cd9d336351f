# SPDX-License-Identifier: Apache-2.0
"""Defines the correct state of a run after each step, whichever workers compute it.

A layer's state is a number that each step mixes with the step's result, and a step's
result is a mix of all layers. So a state that combines different steps, or a step that
was taken twice, shows. Owns these numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetjax.runtime.execution.commit import StepCommit

State = Mapping[str, int]  # by layer
_MASK = (1 << 44) - 1


def mixed(*numbers: int) -> int:
    """Return a number that depends on all of these and on their order."""
    found = 0x9E3779B97F4A7C15
    for number in numbers:
        found = ((found ^ number) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        found ^= found >> 29
    return found & _MASK


def share(layer_state: int, step: int) -> int:
    """Return a layer's share of a step; the shares of all layers are added."""
    return mixed(layer_state, step) >> 8


def updated(state: State, commit: StepCommit) -> dict[str, int]:
    return {layer: mixed(value, int(commit.squares)) for layer, value in state.items()}


def commit_of(total: int) -> StepCommit:
    """Return the result of a step from the sum of its shares."""
    losses = (((0, 0), float(total % 1_000_003)),)
    return StepCommit(squares=float(total), losses=losses, num_tokens=8)


@dataclass
class Truth:
    """The states of a run without faults, by number of steps."""

    layers: tuple[str, ...]
    seed: int
    _states: list[dict[str, int]] = field(default_factory=list)
    _commits: list[StepCommit] = field(default_factory=list)

    def state(self, at: int) -> dict[str, int]:
        """Return the state of all layers after `at` steps."""
        if not self._states:
            self._states.append(
                {layer: mixed(self.seed, n) for n, layer in enumerate(self.layers)}
            )
        while len(self._states) <= at:
            self._states.append(
                updated(self._states[-1], self.commit(len(self._commits)))
            )
        return self._states[at]

    def commit(self, step: int) -> StepCommit:
        """Return the result of the step, counted from 0."""
        while len(self._commits) <= step:
            at = len(self._commits)
            total = sum(share(value, at) for value in self.state(at).values())
            self._commits.append(commit_of(total))
        return self._commits[step]
