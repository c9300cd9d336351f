# SPDX-License-Identifier: Apache-2.0
"""What the state of a run must be after each step, whoever computes it.

A layer's state is a number that each step mixes with what the step has come to, and
what a step comes to is mixed of all layers: a state that was put together of different
steps, or a step that was taken twice, shows. Owns these numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetjax.runtime.execution.commit import StepCommit

State = Mapping[str, int]  # by layer
_MASK = (1 << 44) - 1


def mixed(*numbers: int) -> int:
    """A number that depends on all of these and on their order."""
    found = 0x9E3779B97F4A7C15
    for number in numbers:
        found = ((found ^ number) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        found ^= found >> 29
    return found & _MASK


def share(layer_state: int, step: int) -> int:
    """What a layer brings to a step: shares of all layers are added."""
    return mixed(layer_state, step) >> 8


def updated(state: State, commit: StepCommit) -> dict[str, int]:
    return {layer: mixed(value, int(commit.squares)) for layer, value in state.items()}


def commit_of(total: int) -> StepCommit:
    """What a step has come to, of the sum of its shares."""
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
        """The state of all layers after so many steps."""
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
        """What the step comes to, counted from 0."""
        while len(self._commits) <= step:
            at = len(self._commits)
            total = sum(share(value, at) for value in self.state(at).values())
            self._commits.append(commit_of(total))
        return self._commits[step]
