# SPDX-License-Identifier: Apache-2.0
"""Defines `Rule`: what a file of this room declares about an optimizer rule.

Owns the facts that settings, runtime and costs need about a rule. Does not own their
values (one file per rule), which rules there are (`table.py`), nor the transformation
of a run (`optimizer.py`). No module that settings import may import JAX at its top:
the command line shows help and errors before it imports JAX.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hetjax.errors import BadInput
from hetjax.optimizers.settings import OptimizerConfig

if TYPE_CHECKING:
    import optax

# What a skipped step does to a number of the state: a count of the run's steps, which
# the learning rate follows, advances; a count or sum of updates stays
Number = Literal["steps", "updates", "constant"]
Signs = Literal["signed", "unsigned"]  # of the values of a moment
Transform = Callable[
    [OptimizerConfig, "optax.Schedule"], "optax.GradientTransformation"
]
# (state, weights) by leaf -> the weights that are validated, sampled and exported
EvaluationWeights = Callable[[Any, dict[str, Any]], dict[str, Any]]


class SettingRange(NamedTuple):
    """The range of a setting: a test, the test in words with {} for its name, and a
    value that passes."""

    has: Callable[[float], bool]
    words: str
    example: str


BETA = SettingRange(  # a larger value would be 1 in float32
    lambda x: 0 <= x <= 0.999999, "0 <= {} <= 0.999999", "0.9"
)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An optimizer rule. Parts of its state are named as in Optax: `State.field`.

    `summary` is a line for people. `transform` returns Optax's rule for the settings
    and the learning rate by steps done. `fields` are the settings that the rule reads,
    with their ranges, besides those common to all rules: the rate, its schedule,
    clipping and decay. `numbers` say what a skipped step does to parts of the state
    that are not kept by parameter. `moments` may be kept in 8 bits, as each of their
    values is updated separately. A rule `is_elementwise` if it treats each leaf
    separately and sums over none: then the cut of leaves does not matter. If a rule
    trains at other weights than it evaluates, `evaluation` finds the latter from its
    state. `problems` yields the problems of settings that are each in their range.
    Settings that are `kept` stay as they were at the start of the run.
    """

    summary: str
    transform: Transform
    fields: Mapping[str, SettingRange]
    numbers: Mapping[str, Number]
    moments: Mapping[str, Signs] = field(default_factory=dict)
    is_elementwise: bool = True
    evaluation: Mapping[str, EvaluationWeights] = field(default_factory=dict)
    problems: Callable[[OptimizerConfig], Iterable[BadInput]] = lambda config: ()
    kept: tuple[str, ...] = ()


# the number of Optax's own scaling by a schedule, with which most rules end
STEPS: Mapping[str, Number] = {"ScaleByScheduleState.count": "steps"}


def mean_problems(config: OptimizerConfig) -> Iterable[BadInput]:
    """Yield the problem of betas whose rule divides one mean by another.

    The condition is that of Kingma and Ba 2015, theorem 4.1. Without it, the mean of
    squares decays before the mean of gradients does: where gradients stop, as in the
    embedding of a rare token, updates grow without limit.
    """
    if config.beta1**2 > config.beta2:
        yield BadInput(
            got=f"--optimizer.beta1 {config.beta1:g} with --optimizer.beta2 "
            f"{config.beta2:g} and --optimizer.name {config.name}",
            allowed="beta1 x beta1 <= beta2; updates grow without limit otherwise",
            fix="give --optimizer.beta1 0.9 --optimizer.beta2 0.95, say",
        )
