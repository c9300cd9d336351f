# SPDX-License-Identifier: Apache-2.0
"""Which settings of an optimizer go together, rule by rule.

Owns what each rule allows. Does not own the range of each setting by itself
(`checks.py`) nor the rules (`optimizer.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from hetjax.errors import BadInput
from hetjax.training.settings.config import OptimizerConfig


@dataclass(frozen=True, slots=True)
class _Rule:
    """`has_moments`: each of their numbers is updated apart, so that 8 bits will do;
    `divides`: some updates are a mean of gradients by the root of a mean of squares.
    """

    has_moments: bool
    divides: bool


_RULES = {
    "adamw": _Rule(has_moments=True, divides=True),
    "adafactor": _Rule(has_moments=False, divides=False),  # has no mean of gradients
    "lion": _Rule(has_moments=True, divides=False),
    "muon": _Rule(has_moments=False, divides=True),  # what is no matrix is adamw's
    "sgd": _Rule(has_moments=True, divides=False),
}


def optimizer_problems(config: OptimizerConfig) -> Iterator[BadInput]:
    """Yield what is wrong with settings that are each in their range."""
    yield from _state_problems(config)
    if _RULES[config.name].divides:
        yield from _mean_problems(config)
    yield from _decay_problems(config)


def _state_problems(config: OptimizerConfig) -> Iterator[BadInput]:
    if config.state_bits == 32:
        return
    if not _RULES[config.name].has_moments:
        yield BadInput(
            got=f"--optimizer.state-bits 8 with --optimizer.name {config.name}",
            allowed="8 bits for the moments of adamw, lion and sgd, which treat each "
            "number apart",
            fix="add --optimizer.name adamw, or leave --optimizer.state-bits out",
        )
    elif config.name == "sgd" and not config.beta1:
        yield BadInput(
            got="--optimizer.state-bits 8 with --optimizer.name sgd and "
            "--optimizer.beta1 0",
            allowed="8 bits where there is a state; without momentum sgd has none",
            fix="leave --optimizer.state-bits out, or add --optimizer.beta1 0.9",
        )


def _mean_problems(config: OptimizerConfig) -> Iterator[BadInput]:
    """Kingma and Ba 2015, theorem 4.1. Otherwise the squares are forgotten before the
    mean is: where gradients stop, as in the embedding of a rare token, updates grow
    without limit."""
    if config.beta1**2 > config.beta2:
        yield BadInput(
            got=f"--optimizer.beta1 {config.beta1:g} with --optimizer.beta2 "
            f"{config.beta2:g} and --optimizer.name {config.name}",
            allowed="beta1 x beta1 <= beta2; updates grow without limit otherwise",
            fix="give --optimizer.beta1 0.9 --optimizer.beta2 0.95, say",
        )


def _decay_problems(config: OptimizerConfig) -> Iterator[BadInput]:
    if config.learning_rate * config.weight_decay > 1:
        yield BadInput(
            got=f"--optimizer.learning-rate {config.learning_rate:g} with "
            f"--optimizer.weight-decay {config.weight_decay:g}",
            allowed="learning rate x weight decay <= 1: that share of each weight is "
            "taken off in a step",
            fix="give --optimizer.learning-rate 3e-4 --optimizer.weight-decay 0.1, say",
        )
